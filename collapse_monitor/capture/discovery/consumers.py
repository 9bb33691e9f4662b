"""What is done with a map of attention weights: the product that averages data with it."""

from __future__ import annotations

from dataclasses import replace

from collapse_monitor.capture.discovery.axes import related
from collapse_monitor.capture.discovery.events import FUSED, WALK, Event
from collapse_monitor.capture.discovery.graph import Operation, Value
from collapse_monitor.capture.discovery.semantics import reduces


def attach_consumer(event: Event) -> bool:
    """Find the product that weighs data with this event's map over its keys; False where there is none."""
    if event.weights is None:
        return True
    todo: list[tuple[Value, Value | None]] = [(event.weights, None)]
    seen: set[int] = set()
    while todo and len(seen) < WALK:
        value, weighed = todo.pop(0)
        for operation in value.consumers:
            if operation.index in seen:
                continue
            seen.add(operation.index)
            other = _weighed_operand(operation, value, event)
            if other is not None:
                if other.static and event.scores != "constant":
                    continue
                event.consumer, event.value = operation, other
                return True
            other = _weighed_by_queries(operation, value, event)
            if other is not None:
                _invert(event)
                event.consumer, event.value = operation, other
                return True
            if (
                operation.name == "sum"
                and weighed is not None
                and any(related(value.labels[axis], event.key_label) for axis in operation.axes)
            ):
                event.consumer, event.value = operation, weighed
                return True
            if operation.product is not None and not _mixes_other_axes(operation, value, event):
                continue
            if reduces(operation) or operation.name in FUSED:
                continue
            factor = weighed
            if operation.name in ("mul", "__mul__", "__rmul__"):
                factor = next((v for v in operation.inputs if v is not value and not v.static and len(v.shape) >= 2), weighed)
            todo.extend((output, factor) for output in operation.outputs)
    return False


def _weighed_operand(operation: Operation, weights: Value, event: Event) -> Value | None:
    product = operation.product
    if product is None:
        return None
    for mine, other, axes in (
        (product.left, product.right, product.left_contracted),
        (product.right, product.left, product.right_contracted),
    ):
        if mine is weights and any(
            related(weights.labels[axis], event.key_label) or (not weights.labels[axis] and event.key_length == 1) for axis in axes
        ):
            return other
    lost = not any(related(label, event.key_label) for label in weights.labels) and event.key_length > 1
    if lost and not product.left.static and not product.right.static:
        return product.right if product.left is weights else product.left  # a skewed or chunked map: its axes could not be followed
    return None


def _weighed_by_queries(operation: Operation, weights: Value, event: Event) -> Value | None:
    """Data that a product averages over the other axis of the scores than the one they were normalised over."""
    product = operation.product
    if product is None or event.scores not in ("data", "router") or product.left.static or product.right.static:
        return None
    for mine, other, axes in (
        (product.left, product.right, product.left_contracted),
        (product.right, product.left, product.right_contracted),
    ):
        if mine is weights and any(related(weights.labels[axis], event.query_label) for axis in axes):
            return other
    return None


def _invert(event: Event) -> None:
    """What the scores were normalised over are the queries."""
    axes = event.axes
    assert axes is not None
    assert axes.query is not None
    event.inverted = True
    event.axes = replace(axes, key=axes.query, query=axes.key)
    event.query, event.key = event.key, event.query
    event.query_label, event.key_label = event.key_label, event.query_label
    event.query_length, event.key_length = event.key_length, event.query_length


def _mixes_other_axes(operation: Operation, weights: Value, event: Event) -> bool:
    """Talking heads and re-attention: a product with a weight that leaves the key axis alone."""
    product = operation.product
    assert product is not None
    other = product.right if product.left is weights else product.left
    return other.static and any(related(label, event.key_label) for output in operation.outputs for label in output.labels)
