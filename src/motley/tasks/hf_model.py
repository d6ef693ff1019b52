"""Language models of the transformers library, new or from a local folder, and LoRA.

A config.json gives the shape of a model. Its weights are drawn at random or read from the folder.

The module downloads no model, and runs only the library's own code. Weights are read only from
safetensors, because a pickle may run any code. With LoRA the model's weights stay as they are, and
small matrices beside some of the layers are trained.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. The peft library
implements LoRA.
"""

import copy
import hashlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from motley.errors import MotleyError
from motley.registry import ASKED_OFFLINE, import_extra, import_offline
from motley.tasks.gpt import find_places


def add_lora(
    net: nn.Module, rank: int, alpha: float | None, targets: tuple[str, ...] | None
) -> nn.Module:
    """Freeze a network, and add a pair of LoRA matrices to each target layer, in place.

    Args:
        net: the network.
        rank: rank of the matrices.
        alpha: the product of the matrices is scaled by alpha / rank. None: the scale is 1.
        targets: layers that get matrices, by the last part of their names. None: peft's default for
            a known architecture.

    Raises:
        MotleyError: peft is missing, or the network has no target layers.
    """
    peft = import_offline("peft", f"--lora {rank}")
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank if alpha is None else alpha, lora_dropout=0.0,
        target_modules=None if targets is None else list(targets),
        # GPT-2's weights are transposed; without this flag peft corrects it with a warning.
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in net.modules()),
    )  # fmt: skip
    try:
        result: nn.Module = peft.inject_adapter_in_model(config, net)
    except ValueError as error:
        text = str(error).splitlines()[0].partition(". ")[0]
        raise MotleyError(
            f"--lora {rank}: peft finds no layer to which it can add matrices ({text}); name "
            f"layers with --lora-targets. The model has {', '.join(_layers(net))}"
        ) from None
    if not any(parameter.requires_grad for parameter in result.parameters()):
        raise MotleyError(
            f"--lora {rank}: no layer is left to train; name layers with --lora-targets. The "
            f"model has {', '.join(_layers(net))}"
        )
    return result


def merge_lora(net: nn.Module) -> None:
    """Add the product of the LoRA matrices to each layer's weight, and remove the matrices.

    The network is changed in place.

    A layer that shares its weight with another layer first gets a copy of the weight, because only
    one of the two layers has the matrices.
    """
    owners = Counter(each for _, each in net.named_parameters(remove_duplicate=False))
    for name, part in list(net.named_modules()):
        if hasattr(part, "get_base_layer"):
            base = part.get_base_layer()
            if owners[base.weight] > 1:
                base.weight = nn.Parameter(base.weight.detach().clone())
                config: Any = getattr(net, "config", None)
                if config is not None:  # else transformers ties them again
                    config.tie_word_embeddings = False
            part.merge()
            above, _, last = name.rpartition(".")
            setattr(net.get_submodule(above), last, part.get_base_layer())


def save_adapter(net: nn.Module, folder: Path, base: Path) -> None:
    """Write only the LoRA matrices, in the format of peft.

    Args:
        net: the network.
        folder: folder to create.
        base: folder of the model without the matrices.
    """
    peft = import_offline("peft", "--lora")
    from safetensors.torch import save_file

    tensors = peft.get_peft_model_state_dict(net, save_embedding_layers=False)
    folder.mkdir()
    save_file(
        {f"{_OF_PEFT}{name}": each.detach().cpu().contiguous() for name, each in tensors.items()},
        folder / "adapter_model.safetensors", {"format": "pt"},
    )  # fmt: skip
    config = copy.copy(getattr(net, "peft_config")["default"])  # noqa: B009  # not of nn.Module
    config.base_model_name_or_path, config.task_type = str(base), "CAUSAL_LM"
    config.inference_mode = True
    config.save_pretrained(folder)


def matrices(net: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that hold LoRA matrices."""
    return tuple(
        path for path, _ in net.named_modules() if path.rsplit(".", 1)[-1].startswith("lora_")
    )


def beside_lora(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model without LoRA, renamed for the model with LoRA matrices."""
    moved = {name.replace(".base_layer.", "."): name for name in net.state_dict()}
    return {moved.get(name, name): tensor for name, tensor in tensors.items()}


def _layers(net: nn.Module) -> list[str]:
    """Return the last part of the name of each layer that LoRA supports, sorted."""
    return sorted({
        name.rsplit(".", 1)[-1] for name, part in net.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ == "Conv1D"
    })  # fmt: skip


_CONFIG = "config.json"
_OF_PEFT = "base_model.model."  # prefix of names in peft's files
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LOOKED_AT = 8  # tokens in the test for causality, which changes the later half


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy the files of a tokenizer that exist in one folder into another folder."""
    for name in _TOKENIZER:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)


def find_tokenizer(name: str, downloads: bool) -> Path:
    """Return the local folder of a tokenizer that is on the Hugging Face hub.

    Args:
        name: the name, as OWNER/NAME.
        downloads: True: download its files if they are not on this host.

    Raises:
        MotleyError: the files are not on this host, and cannot be downloaded.
    """
    option = f"--tokenizer {name}"
    hub = import_extra("huggingface_hub", option)
    known, constants = {"allow_patterns": list(_TOKENIZER)}, hub.constants
    before = constants.HF_HUB_OFFLINE
    try:
        return Path(hub.snapshot_download(name, local_files_only=True, **known))
    except Exception as error:  # no common type: a wrong name, no such files
        cause = error
    try:
        if downloads and not ASKED_OFFLINE:
            constants.HF_HUB_OFFLINE = False
            return Path(hub.snapshot_download(name, **known))
    except Exception as error:  # also of the network
        cause = error
    finally:
        constants.HF_HUB_OFFLINE = before
    raise MotleyError(
        f"{option} is neither a folder on this machine nor a tokenizer that can be downloaded "
        f"from the hub ({type(cause).__name__}: {_first_line(cause)}); name a folder with "
        "tokenizer.json, or OWNER/NAME"
    )


@dataclass(frozen=True)
class HfModel:
    """A transformers model that a user has named.

    Attributes:
        path: path of a config.json, or of a folder with one.
        option: option that named the model, for errors.
        with_weights: True: the weights are read from the folder. False: they are drawn at random.
    """

    path: Path
    option: str
    with_weights: bool

    @property
    def flag(self) -> str:
        """The option and its value, as the user wrote them."""
        return f"{self.option} {self.path}"

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Fields of config.json.

        Raises:
            MotleyError: the file is missing, is no JSON, or does not describe a model.
        """
        path = self.path / _CONFIG if self.path.is_dir() else self.path
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MotleyError(
                f"{self.flag}: {path.name} cannot be read ({error.strerror}). Give a folder on "
                f"this machine that holds a model's {_CONFIG}, as save_pretrained() writes it; "
                "Motley downloads no models"
            ) from None
        except ValueError as error:
            raise MotleyError(f"{self.flag}: {path.name} is not valid JSON ({error})") from None
        if not isinstance(result, dict) or not isinstance(result.get("model_type"), str):
            raise MotleyError(
                f"{self.flag}: {path.name} has no model_type, such as gpt2; it has to be the "
                f"{_CONFIG} of a model"
            )
        return result

    @cached_property
    def config(self) -> Any:
        """Configuration of the model, an object of the transformers library.

        Raises:
            MotleyError: this version of transformers has no model of this type.
        """
        transformers = import_offline("transformers", self.option)
        kind = self.fields["model_type"]
        if kind not in transformers.CONFIG_MAPPING:
            raise MotleyError(
                f"{self.flag}: transformers {transformers.__version__} has no model_type "
                f"{kind!r}, and Motley does not run code from a model's folder"
            )
        try:
            # from_dict() removes fields from its argument.
            return transformers.CONFIG_MAPPING[kind].from_dict(dict(self.fields))
        except Exception as error:
            raise MotleyError(f"{self.flag}: {_first_line(error)}") from None

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return int(self.config.vocab_size)

    @property
    def longest(self) -> int | None:
        """Largest context length in tokens. None: the model has no limit."""
        result = getattr(self.config, "max_position_embeddings", None)
        return result if isinstance(result, int) else None

    def build(self, dropout: float, packed: bool = False) -> nn.Module:
        """Return the model in fp32, on the CPU, with weights from torch's random generator.

        Args:
            dropout: drop-out probability.
            packed: True: samples have several documents; see :func:`run_packed`.

        Raises:
            MotleyError: the model cannot be built, is not causal, or does not separate packed
                documents.
        """
        transformers = import_offline("transformers", self.option)
        config = self.config
        _set_dropout(config, dropout)
        config.use_cache = False  # training does not use the cache, which is not a tensor
        maker = transformers.AutoModelForCausalLM
        if type(config) not in maker._model_mapping:
            raise MotleyError(self._no_language_model("transformers has no causal model of it"))
        with _quiet(transformers):
            try:
                net = maker.from_config(config, dtype=torch.float32, trust_remote_code=False)
            except Exception as error:
                raise MotleyError(
                    f"{self.flag}: the model of this {_CONFIG} cannot be built: "
                    f"{_first_line(error)}"
                ) from error
        # The check runs a pass, which is impossible on meta tensors.
        has_numbers = not any(parameter.is_meta for parameter in net.parameters())
        if has_numbers and not _is_causal(net, self.vocabulary):
            raise MotleyError(
                self._no_language_model("its output for a token depends on later tokens")
            )
        if has_numbers and packed and not _separates(net, self.vocabulary):
            raise MotleyError(
                f"{self.flag}: a model of type {self.fields['model_type']} cannot keep the "
                "documents of a packed sample apart; leave out --pack"
            )
        result: nn.Module = net.train()
        return result

    def _no_language_model(self, why: str) -> str:
        kind = self.fields["model_type"]
        return (
            f"{self.flag}: a model of type {kind} cannot learn to predict each next token, since "
            f"{why}. It may be an encoder, such as BERT; take a decoder, such as GPT-2 or Llama"
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in the folder, fp32, by their names in the model of :meth:`build`.

        The transformers library converts the names in older files.

        Raises:
            MotleyError: the folder has no weights, the weights are pickles, some weights are
                missing, or shapes differ.
        """
        self._check_files()
        transformers = import_offline("transformers", self.option)
        with _quiet(transformers):
            try:
                net, info = transformers.AutoModelForCausalLM.from_pretrained(
                    self.path, config=self.config, dtype=torch.float32, local_files_only=True,
                    trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )  # fmt: skip
            except Exception as error:
                raise MotleyError(
                    f"{self.flag}: the weights cannot be read: {_first_line(error)}; copy the "
                    "folder again"
                ) from error
        for key, says in {
            "missing_keys": "lacks", "mismatched_keys": "has in another shape",
        }.items():  # fmt: skip
            # transformers draws these weights at random, and only warns.
            names = sorted(each[0] if isinstance(each, tuple) else each for each in info[key])
            if names:
                raise MotleyError(
                    f"{self.flag} {says} {len(names)} of the model's weights, such as {names[0]}. "
                    f"The {_CONFIG} may belong to another model"
                )
        result: dict[str, Tensor] = net.state_dict()
        return result

    def _check_files(self) -> None:
        if any(next(self.path.glob(each), None) for each in _WEIGHTS):
            return
        pickles = [path.name for each in _PICKLES for path in sorted(self.path.glob(each))]
        if pickles:
            raise MotleyError(
                f"{self.flag} stores its weights as a pickle ({pickles[0]}), and reading a pickle "
                "can run any code. If you trust its source, convert the file with transformers 4: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) writes "
                "safetensors"
            )
        raise MotleyError(
            f"{self.flag} has no weights (*.safetensors); for random weights, use --hf-config "
            f"{self.path}"
        )

    def save(self, net: Any, folder: Path) -> None:
        """Write a folder that transformers loads, with the tokenizer's files if there are any."""
        transformers = import_offline("transformers", self.option)
        with _quiet(transformers):
            net.save_pretrained(folder)
        copy_tokenizer(self.path, folder)

    def identity(self) -> dict[str, str]:
        """Return the hash of the config, by which a checkpoint recognises the model.

        The hash depends neither on the folder's path nor on the weights in the folder, because a
        checkpoint has its own weights.
        """
        fields = json.dumps(self.fields, sort_keys=True)
        return {"hf_config_sha256": hashlib.sha256(fields.encode()).hexdigest()[:16]}

    def title(self) -> str:
        """Return the model's type, folder and kind of weights, for the summary of a run."""
        weights = "its weights" if self.with_weights else "random weights"
        return f"{self.fields['model_type']} of {self.path.resolve().name} ({weights})"


def get_logits(made: Any) -> Tensor:
    """Return the logits in a model's output, [n, length, vocabulary].

    Args:
        made: the logits themselves, or an output object of transformers.
    """
    result: Tensor = made if isinstance(made, Tensor) else made["logits"]
    return result


def run_packed(net: Any, batch: Mapping[str, Tensor], named: HfModel | None) -> Any:
    """Return a model's output for samples of several documents that do not affect each other.

    A model of transformers gets the position of each token in its document. The library's attention
    mask separates documents where the positions start at 0 again.

    Args:
        net: the model.
        batch: tensors ``tokens`` and ``documents``, [n, length] each.
        named: description of the model of transformers; None: ``net`` is the built-in GPT.
    """
    tokens, documents = batch["tokens"], batch["documents"]
    if named is None:
        return net(tokens, documents)
    return net(tokens, position_ids=find_places(documents))


def _set_dropout(config: Any, dropout: float) -> None:
    """Set all drop-out probabilities of a config, whatever their names.

    The rates at which whole layers are dropped become 0, because the parameters of a dropped layer
    would have no gradient.
    """
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, 0.0 if "layerdrop" in key else dropout)


@torch.no_grad()
def _is_causal(net: nn.Module, vocabulary: int) -> bool:
    """Test by two passes that the output for a token does not depend on later tokens.

    For some kinds of model, a field of the configuration decides this.
    """
    net.eval()
    here = torch.arange(_LOOKED_AT)[None] % vocabulary
    other, half = here.clone(), _LOOKED_AT // 2
    other[:, half:] = (other[:, half:] + 1) % vocabulary
    one, two = (get_logits(net(each))[:, :half] for each in (here, other))
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5 * float(one.abs().max() + 1))


@torch.no_grad()
def _separates(net: nn.Module, vocabulary: int) -> bool:
    """Test by two passes that a packed document has the same output as the document alone."""
    net.eval()
    here = torch.arange(_LOOKED_AT)[None] % vocabulary
    half = _LOOKED_AT // 2
    places = torch.arange(half).repeat(2)[None]
    packed = get_logits(net(here, position_ids=places))[:, half:]
    alone = get_logits(net(here[:, half:]))
    return torch.allclose(packed, alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max() + 1))


class _quiet:  # noqa: N801  # a context manager
    """A context manager that suppresses transformers' messages, which every rank would print."""

    def __init__(self, transformers: Any) -> None:
        self._logging = transformers.utils.logging
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> None:
        self._before = self._logging.get_verbosity()
        self._bar = self._logging.is_progress_bar_enabled()
        self._logging.set_verbosity_error()
        self._logging.disable_progress_bar()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *_: object) -> None:
        self._caught.__exit__(None, None, None)
        self._logging.set_verbosity(self._before)
        if self._bar:
            self._logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
