"""Check this machine's Python environment: import its packages, run a kernel on each device.

    .venv/bin/python -m motley.provision.verify_env

The last line of the output is JSON: {"torch": "2.15.0+cu132", "kernels": ["cpu fp32 0.1 TFLOP/s"]}
"""

import importlib
import json
import sys

PACKAGES = ("torch", "torchvision", "deepspeed", "mpi4py.MPI", "GPUtil", "timm", "matplotlib",
            "paramiko")  # fmt: skip


def main() -> int:
    """Print torch's version and the kernels' speeds as JSON and return 0; on a fault return 1."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library raises anything
            print(f"motley: {name} cannot be imported: {error}", file=sys.stderr)
            return 1
    import torch

    from motley.measure.device import kernel_speed
    from motley.plan.precision import best_precision

    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    kernels = []
    for device in devices:
        cuda = device.type == "cuda"
        precision, _ = best_precision(torch.cuda.get_device_capability(device) if cuda else None)
        speed = kernel_speed(device, precision)
        if speed.tflops is None:
            built = f" (torch has kernels for {', '.join(torch.cuda.get_arch_list())})"
            print(f"motley: {device} {precision}: {speed.error}{built * cuda}", file=sys.stderr)
            return 1
        name = torch.cuda.get_device_name(device) if cuda else "cpu"
        kernels.append(f"{name} {precision} {speed.tflops:.3g} TFLOP/s")
    print(json.dumps({"torch": torch.__version__, "kernels": kernels}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
