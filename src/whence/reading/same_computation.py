"""A trace of ready tensors is of the very computation that the model makes of them, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.capture.attach import accepted
from whence.reading.capture.untouched import evaluating
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import on_device
from whence.reading.trace import Trace
from whence.reading.wiring.op_graph import deviation


def check_outputs(model: Model, prepared: Sequence[Prepared], traces: Sequence[Trace], tolerance: float) -> None:
    """Compare the traces' logits (or final states) with those of one plain pass of the whole batch as it was given."""
    given = prepared[0].given
    assert given is not None
    with evaluating(model.model):
        output = model.model(**accepted(model.model, on_device(model, given)))
    for name, kept in (("logits", "logits"), ("last_hidden_state", "final_states")):
        theirs = getattr(output, name, None)
        if not isinstance(theirs, Tensor) or any(getattr(trace, kept) is None for trace in traces):
            continue
        for one, trace in zip(prepared, traces, strict=True):
            ours: Tensor = getattr(trace, kept)
            error = deviation(ours, _shown(theirs[one.row], ours, given, one))
            if not error <= tolerance:
                raise InputError(
                    f"sequence {one.row}, traced by itself, gives {name.replace('_', ' ')} that differ by {error:.1e} from "
                    f"those of the model on the given inputs ({_described(given)}): the model reads them in a way that "
                    "whence cannot follow. Give the sequence without padding, or as a text."
                )
        return


def _shown(theirs: Tensor, ours: Tensor, given: Mapping[str, Tensor], one: Prepared) -> Tensor:
    """The rows of a plain pass that the trace holds: those that the masks show."""
    decodes = any(
        name.startswith("decoder_input") for name in one.inputs
    )  # then the outputs are of the decoder's tokens
    for name in ("decoder_attention_mask",) if decodes else ("attention_mask",):
        mask = given.get(name)
        if mask is None or mask.dim() != 2 or ours.dim() != 2 or theirs.shape[0] != mask.shape[1]:
            continue
        return theirs[mask[one.row].bool().to(theirs.device)]
    return theirs


def _described(given: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in given.items())
