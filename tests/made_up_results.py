"""Results made up for tests of what follows from results."""

from dcdm.reproduction.results import Results


def results_of(values: dict[tuple[str, int], float], windows: int = 4) -> Results:
    """Results whose valid figure is the given one on every window."""
    results = Results("cpu")
    for (name, seed), nats in values.items():
        valid = {
            "nats_per_token": nats, "numbers": list(range(windows)), "window_nats": [nats * 10] * windows,
            "window_tokens": [10] * windows,
        }  # fmt: skip
        results.runs[name, seed] = {"variant": name, "seed": seed, "measures": {"heldout": {"valid": valid}}}
    return results


def with_curves(curves: dict[tuple[str, int], list[list[float]]]) -> Results:
    results = results_of(dict.fromkeys(curves, 5.0))
    for key, points in curves.items():
        results.runs[key]["measures"]["curve"] = {"validation": points}
    return results
