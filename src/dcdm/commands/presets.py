"""`dcdm presets`: the named models and their sizes."""

from __future__ import annotations

from typing import Any

from dcdm.commands.options import JsonOption, print_json, print_rows

EXAMPLES = ("dcdm presets", "dcdm presets --json")


def presets(json: JsonOption = False) -> None:
    """List the model presets with their sizes."""
    from dcdm.kinds import parameter_counts
    from dcdm.presets import preset
    from dcdm.presets import presets as preset_names

    rows: dict[str, dict[str, Any]] = {}
    for name in preset_names():
        config = preset(name)
        chunked = config.kind == "dcdm"
        total, active = parameter_counts(config)
        rows[name] = {
            "kind": config.kind, "routing": config.routing if chunked else None,
            "N×d": f"{config.num_layers}×{config.hidden_size}", "B": config.block_size,
            "K/h": f"{config.num_chunks}/{config.chunk_dim}" if chunked else None,
            "parameters": total, "active": active,
        }  # fmt: skip
    if json:
        print_json(rows)
        return
    print_rows([
        {"preset": name, **row} | {key: f"{row[key] / 1e6:.2f}M" for key in ("parameters", "active")}
        for name, row in rows.items()
    ])  # fmt: skip
