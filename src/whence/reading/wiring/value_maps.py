"""How queries, keys and values are read from a block's input: one linear map each, after a norm where there is one."""

from __future__ import annotations

from torch import Tensor

from whence.reading.capture.recorder import Call
from whence.reading.wiring.dataflow import NotRecognised, closure, origins
from whence.reading.wiring.linear_maps import matching_columns, scaled_linear_map
from whence.reading.wiring.linear_ops import LinearMap
from whence.reading.wiring.norm_search import norm_making
from whence.reading.wiring.norms import Norm
from whence.reading.wiring.op_graph import Node, OpGraph, deviation, flat
from whence.reading.wiring.residual import WiringEvidence


def find_value_map(
    graph: OpGraph, value: Tensor, evidence: WiringEvidence, tolerance: float
) -> tuple[Norm | None, LinearMap]:
    """values = n(r) · weight + bias, columns in the order (kv head, d_v)."""
    if evidence.residual is None:
        raise NotRecognised("the block's input is not known")
    read, linear = _map_of(graph.node(value))
    same = {id(n) for n in (*origins(evidence.residual), *closure(evidence.residual))}
    norm: Norm | None = None
    if not same & {id(n) for n in origins(read)}:
        normed = norm_making(graph, read, tolerance)
        if normed is None or not same & {id(n) for n in origins(normed[1])}:
            raise NotRecognised("the values are read neither from the block's input nor from a norm of it")
        norm = normed[0]
    state = flat(evidence.residual.value)
    rebuilt = linear(state if norm is None else norm(state))
    error = deviation(_by_token(value), rebuilt)
    if error > tolerance:
        raise NotRecognised(f"rebuilding the values from the block's input misses them by {error:.1e}")
    return norm, linear


def query_and_key_maps(
    graph: OpGraph, call: Call, evidence: WiringEvidence, norm: Norm | None, values: LinearMap, tolerance: float
) -> tuple[LinearMap, LinearMap, LinearMap]:
    """Queries and keys as linear maps of the same normed input: no rotation, no norm of their own."""
    assert evidence.residual is not None
    state = flat(evidence.residual.value)
    read = state if norm is None else norm(state)
    maps = []
    for name, tensor in (("queries", call.query), ("keys", call.key)):
        if tensor is None:
            raise NotRecognised(f"the {name} are not known")
        _, linear = _map_of(graph.node(tensor))
        error = deviation(_by_token(tensor), linear(read))
        if error > tolerance:
            raise NotRecognised(f"rebuilding the {name} from the block's input misses them by {error:.1e}")
        maps.append(linear)
    return maps[0], maps[1], values


def _by_token(heads: Tensor) -> Tensor:
    """(batch, head, token, d) → (batch · token, head · d) in float64."""
    return flat(heads.transpose(1, 2).flatten(2))


def _map_of(node: Node) -> tuple[Node, LinearMap]:
    """The linear map whose output, reshaped or cut, these heads are: by the numbers in its columns."""
    wanted = _by_token(node.value)
    current: Node | None = node
    for _ in range(16):
        if current is None or current.producer is None:
            break
        made = scaled_linear_map(current.producer)
        if made is not None:
            columns = matching_columns(flat(current.value), wanted)
            if columns is None:
                raise NotRecognised(
                    "they are not columns of the linear map that they come from (rotated, normed or scaled)"
                )
            return origins(made[0])[-1], made[1].columns(columns)
        current = current.producer.inputs[0] if current.producer.inputs else None
    raise NotRecognised("they do not come from a linear map")
