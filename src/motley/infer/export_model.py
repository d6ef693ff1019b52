"""Write a trained model into a folder, for timm, transformers and ONNX.

    python torch_dist/export.py logs/RUN --to exported
    python torch_dist/export.py logs/RUN --to exported --onnx

The argument is a run, whose newest intact checkpoint is exported, or the folder of one checkpoint.
Two calls load an exported image classifier: timm.create_model("local-dir:exported",
pretrained=True), and transformers' AutoModelForImageClassification.from_pretrained("exported").
The file config.json has the normalisation of images. For other tasks, model.safetensors has the
parameters by name. The ONNX model takes any number of samples, and its output in onnxruntime is
compared with torch's. The command needs no GPU.
"""

import argparse
import sys
from pathlib import Path

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.text import escape_unprintable


def main() -> int:
    """Export the model that the command line names, and return the exit code."""
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a checkpoint's")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--onnx", action="store_true", help="also write model.onnx, and check it")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the data, if it has moved")
    parser.add_argument(
        "--use-ema",
        action="store_true",
        help=("for a run with --model-ema: use the averaged parameters"),
    )
    options = parser.parse_args()
    from motley.infer.export import (
        export,
    )  # imported here: these load torch, which -h does not need
    from motley.infer.predictor import open_trained

    try:
        trained = open_trained(options.run, options.data_dir, averaged=options.use_ema)
        print(*(f"not used: {problem}" for problem in trained.problems), sep="\n", end="")
        print(f"{trained.task.title()}, of {trained.folder}")
        for line in export(trained, options.to, options.onnx):
            print(f"  {options.to}/{line}")
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 1
    return 0
