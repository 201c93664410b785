"""One added line in the script that you have: callbacks for Hugging Face's Trainer and for Lightning, and LoRA.

    TransformersCallback   Trainer(model, args, …, callbacks=[TransformersCallback(run="demo", every=50)])
    LightningCallback      lightning.Trainer(callbacks=[LightningCallback(run="demo", every=50)])
    exact_lora             a PEFT model whose averages are exact: every A is the same and frozen, B is averaged

Each is imported when it is first used, so that only the library that you have is needed: the extras `trainer`,
`lightning` and `peft` name them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marfl.errors import InputError

if TYPE_CHECKING:
    from marfl.integrations.lightning_callback import LightningCallback
    from marfl.integrations.lora import exact_lora
    from marfl.integrations.transformers_callback import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback", "exact_lora"]

_HOMES = {  # where each is, and the extra that it needs
    "LightningCallback": ("lightning_callback", "lightning"),
    "TransformersCallback": ("transformers_callback", "trainer"),
    "exact_lora": ("lora", "peft"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'marfl.integrations' has no attribute {name!r}")
    home, extra = _HOMES[name]
    try:
        return getattr(import_module(f"marfl.integrations.{home}"), name)
    except ModuleNotFoundError as error:
        raise InputError(f"{name}: {error.name} is not installed (pip install 'marfl[{extra}]')") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
