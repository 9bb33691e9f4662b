"""`find_sites` against what each model's source says."""

from __future__ import annotations

from collapse_monitor.once import find_sites
from tests.capture.models import Case, each


@each()
def test_blocks_are_found_in_order_of_entry(case: Case) -> None:
    args, kwargs = case.call(0)
    sites = find_sites(case.model(), *args, **kwargs)
    blocks = [site for site in sites if site.kind == "block"]
    assert [(site.name, site.layer) for site in blocks] == [(name, layer) for layer, name in enumerate(case.blocks)]
    assert all(site.heads is None and site.causal is None and site.how == "module" for site in blocks)


@each()
def test_attentions_are_found_with_all_they_are(case: Case) -> None:
    args, kwargs = case.call(0)
    sites = find_sites(case.model(), *args, **kwargs)
    found = [
        (site.name, site.layer, site.heads, site.query_length, site.key_length, site.causal, site.cross, site.how)
        for site in sites
        if site.kind == "attention"
    ]
    assert found == [(a.name, a.layer, a.heads, a.queries, a.keys, a.causal, a.cross, a.how) for a in case.attentions]
