"""LoRA: the model's weights stay as they are, and small matrices beside some of them are trained.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; by the peft library.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from motley.errors import MotleyError
from motley.extras import import_offline


def add_lora(
    net: nn.Module, rank: int, alpha: float | None, targets: tuple[str, ...] | None
) -> nn.Module:
    """Freeze a network, and put a pair of matrices beside each of its target layers, in place.

    Args:
        rank: of the matrices. alpha: what they say counts alpha / rank; None: as much as it is.
        targets: last words of layers' names; None: peft's own, for an architecture that it knows.

    Raises:
        MotleyError: peft is missing, or finds no such layers.
    """
    peft = import_offline("peft", f"--lora {rank}")
    config = peft.LoraConfig(
        r=rank, lora_alpha=rank if alpha is None else alpha, lora_dropout=0.0,
        target_modules=None if targets is None else list(targets),
        # GPT-2's layers are kept transposed; peft would find out too, and warn.
        fan_in_fan_out=any(type(part).__name__ == "Conv1D" for part in net.modules()),
    )  # fmt: skip
    try:
        found: nn.Module = peft.inject_adapter_in_model(config, net)
    except ValueError as error:
        said = str(error).splitlines()[0].partition(". ")[0]
        raise MotleyError(
            f"--lora {rank} finds no layer to stand beside ({said}); name some by --lora-targets: "
            f"the model has {', '.join(_layers(net))}"
        ) from None
    if not any(parameter.requires_grad for parameter in found.parameters()):
        raise MotleyError(
            f"--lora {rank}: nothing is left to train; name layers by --lora-targets: the model "
            f"has {', '.join(_layers(net))}"
        )
    return found


def merge_lora(net: nn.Module) -> None:
    """Add the matrices to the layers that they stand beside, and take them away, in place.

    A layer that shares its weight with another one gets a weight of its own first: the matrices
    change what this layer computes, and not the other.
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


def matrices(net: nn.Module) -> tuple[str, ...]:
    """Paths of LoRA's own modules."""
    return tuple(
        path for path, _ in net.named_modules() if path.rsplit(".", 1)[-1].startswith("lora_")
    )


def beside_lora(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Weights of a model without LoRA, by the names that they have with it."""
    moved = {name.replace(".base_layer.", "."): name for name in net.state_dict()}
    return {moved.get(name, name): tensor for name, tensor in tensors.items()}


def _layers(net: nn.Module) -> list[str]:
    """Last words of the names of what LoRA can stand beside."""
    return sorted({
        name.rsplit(".", 1)[-1] for name, part in net.named_modules()
        if isinstance(part, nn.Linear | nn.Embedding) or type(part).__name__ == "Conv1D"
    })  # fmt: skip
