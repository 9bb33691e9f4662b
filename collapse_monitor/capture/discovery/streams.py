"""Following the residual stream: what goes into a block, what comes out, and where attention joins it."""

from __future__ import annotations

from collections.abc import Iterable

from collapse_monitor.capture.discovery.axes import is_feature, related
from collapse_monitor.capture.discovery.blocks import FoundBlock
from collapse_monitor.capture.discovery.events import Event
from collapse_monitor.capture.discovery.graph import Graph, Operation, Value
from collapse_monitor.capture.discovery.semantics import ADDITIONS
from collapse_monitor.capture.sampling import Layout, default_layout


def layout_of(value: Value, attention: Event | None) -> Layout:
    """Which axes of a hidden state run over sequences, tokens and features, given an attention whose queries are its tokens."""
    tokens = attention.query_label if attention is not None else ()
    axes = range(len(value.shape))
    feature = tuple(axis for axis in axes if is_feature(value.labels[axis]))
    token = tuple(axis for axis in axes if axis not in feature and related(value.labels[axis], tokens))
    if attention is not None and len(token) == 2 and token[0] == 0 and value.shape[0] == attention.packed:
        token = token[1:]  # its sequences were packed into one axis for the attention only
    if not feature and token and token[-1] != axes[-1]:
        feature = (axes[-1],)  # an input of the model: its features were not made by a weight
    if not tokens and len(feature) == 1 and 0 < feature[0] < axes[-1]:
        token = tuple(axis for axis in axes[1:] if axis not in feature)  # maps of rows and columns before anything attended to them
    if not feature or not token or len(feature) == len(value.shape):
        return default_layout(len(value.shape))
    return Layout(tuple(axis for axis in axes if axis not in feature and axis not in token), token, feature)


def is_hidden(value: Value) -> bool:
    """Whether the value could be a hidden state: data, with features on an axis, and at least two axes."""
    return not value.static and len(value.shape) >= 2 and (any(is_feature(label) for label in value.labels) or len(value.shape) == 3)


def joins(addition: Operation, event: Event) -> int | None:
    """Which operand of an addition carries the event's result into a tensor that does not descend from it."""
    if addition.name not in ADDITIONS or len(addition.inputs) < 2:
        return None
    left, right = addition.inputs[:2]
    if left.static or right.static or left.shape != right.shape or not is_hidden(addition.outputs[0]):
        return None
    carries = [_descends(left, event), _descends(right, event)]
    return carries.index(True) if carries.count(True) == 1 else None


def _descends(value: Value, event: Event) -> bool:
    return value.stems_from(event.operation)


def output_value(graph: Graph, block: FoundBlock, following: FoundBlock | None) -> Value | None:
    """The hidden state after the block: what its call returns, or, where its caller adds the residual, the sum."""
    if block.frame is not None and block.frame.parent is not None:
        value = _returned(block)
    elif block.calls:
        value = next((value for _, value in block.calls[-1].outputs if is_hidden(value)), None)
    else:
        return _last_sum(graph, block)
    if value is None or (block.frame is not None and block.name == ""):
        return value
    return _sum_outside(block, value, following) or value


def _returned(block: FoundBlock) -> Value | None:
    assert block.frame is not None
    given = {value.shape for value in block.frame.inputs if not value.static and len(value.shape) >= 2}
    hidden = [value for _, value in block.frame.outputs if is_hidden(value)]
    alike = [value for value in hidden if value.shape in given]
    fed = [value for value in alike if not block.sites or any(_descends(value, site.first) for site in block.sites)]
    return next(iter(fed or alike or hidden), None)


def _sum_outside(block: FoundBlock, value: Value, following: FoundBlock | None) -> Value | None:
    """The caller's addition of what the block returned to something older, before the next block begins."""
    limit = following.start if following is not None else value.index + 10**9
    for operation in value.consumers:
        if operation.name not in ADDITIONS or operation.index <= block.end or (following is not None and operation.index >= limit):
            continue
        other = next((v for v in operation.inputs if v is not value), None)
        if other is not None and not other.static and other.shape == value.shape and _older(other, block):
            return operation.outputs[0]
    return None


def _older(value: Value, block: FoundBlock) -> bool:
    return value.producer is None or value.producer.index < block.start or block.frame is None


def _last_sum(graph: Graph, block: FoundBlock) -> Value | None:
    """Of code without a call of its own: the last addition that depends on the block's attention."""
    site = block.sites[0].first
    found: Value | None = None
    for operation in graph.operations[block.start : block.end + 1]:
        if (operation.name in ADDITIONS and joins(operation, site) is not None) or (
            found is not None
            and operation.name in ADDITIONS
            and any(value is found for value in operation.inputs)
            and is_hidden(operation.outputs[0])
        ):
            found = operation.outputs[0]
    return found


def input_value(block: FoundBlock, output: Value | None, previous: Value | None) -> Value | None:
    """The hidden state before the block, of the output's shape; None where the token sets differ."""
    if output is None:
        return None
    frame = block.frame if block.frame is not None and block.frame.parent is not None else (block.calls[0] if block.calls else None)
    if frame is None:
        return previous if previous is not None and previous.shape == output.shape else None
    alike = [value for value in frame.inputs if value.shape == output.shape and is_hidden(value)]
    if previous is not None and any(value is previous for value in alike):
        return previous
    return next(iter(alike), None)


def attention_of(block: FoundBlock, events: Iterable[Event]) -> Event | None:
    """The block's attention, or any attention for a block without one."""
    return block.sites[0].first if block.sites else next(iter(events), None)
