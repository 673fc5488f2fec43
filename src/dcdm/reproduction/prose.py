"""Sentences that follow from results: the summary, the claims one by one, and who wins where on the frontier."""

from __future__ import annotations

from collections import Counter

from dcdm.reproduction.experiments import specs
from dcdm.reproduction.grid import shown
from dcdm.reproduction.reading import VALID, Results
from dcdm.reproduction.runs import is_current
from dcdm.reproduction.scale import FORWARDS_PER_TOKEN, scale
from dcdm.reproduction.variants import variants
from dcdm.reproduction.verdicts import CONFIRMED, NOT, UNKNOWN, Claim, claims

MANY = 4  # parts of a claim that are named one by one


def prose(results: Results) -> dict[str, str]:
    """Every piece of text by name, as markdown."""
    return {"summary": summary(results), "claims": claim_by_claim(results), "winners": winners(results)}


def summary(results: Results) -> str:
    """What was found, in half a screen."""
    wanted = specs(scale(results.scale), ["all"])
    done = sum((one.variant.name, one.seed) in results.runs for one in wanted)
    if not results.runs:
        return "**No results are stored yet**: the commands work, their runs at CPU scale are still to be done."
    lines = [f"{done} of {len(wanted)} runs are finished.", ""]
    other = [one.name for one in wanted if (run := results.runs.get((one.variant.name, one.seed))) is not None
             and not is_current(run, one)]  # fmt: skip
    if other:
        lines.append(f"- **Of earlier settings**, to be run again: {', '.join(other)}.")
    found = claims(results)
    for verdict in (CONFIRMED, NOT, UNKNOWN):
        own = [claim for claim in found if claim.verdict == verdict]
        if own:
            lines.append(f"- **{verdict[0].upper()}{verdict[1:]}**: {'; '.join(map(_said, own))}.")
    names = variants(scale(results.scale))
    scored = sum(results.figure(*run, VALID) is not None for run in results.runs)
    if stuck := results.at_frequencies():
        counts = Counter(name for name, _ in stuck)
        told = ", ".join(f"{name} {count} of {len(results.seeds(name))}" for name, count in counts.items())
        lines.append(
            "- **Still at the frequencies of single tokens** when training ends (seeds of a model): "
            f"{told}; {len(stuck)} of all {scored} runs that were not fine-tuned."
        )
    best = min(
        ((value.mean, name) for name, one in names.items()
         if name != "ar" and (value := results.mean(name, VALID)) is not None and value.seeds >= one.seeds),
        default=None,
    )  # fmt: skip
    if best is not None:
        named = names[best[1]].says
        said = shown(results.mean(best[1], VALID))
        lines.append(f"- **Lowest valid bound** of the diffusion models: {named}, {said} nats per token.")
    gap = results.difference("paper", "paper", ("heldout", "surrogate"), VALID)
    if gap is not None:
        lines.append(
            f"- **Surrogate − valid bound** of the same DCDM weights on the same windows: {shown(gap, sign=True)} "
            "nats per token."
        )
    return "\n".join(lines)


def _said(claim: Claim) -> str:
    """The claim, and what of it holds where not all does."""
    held = [part.name for part in claim.parts if part.verdict == CONFIRMED]
    if claim.verdict == CONFIRMED or not held or len(claim.parts) > MANY:
        return claim.says
    return f"{claim.says} (confirmed of it: {', '.join(held)} below zero)"


def claim_by_claim(results: Results) -> str:
    """A paragraph for every claim: verdict, figures, and why."""
    return "\n\n".join(_claim(claim) for claim in claims(results))


def _claim(claim: Claim) -> str:
    lines = [f"**{claim.says[0].upper()}{claim.says[1:]}**: *{claim.verdict}* (`{claim.experiment}`)."]
    known = [part for part in claim.parts if part.difference is not None]
    if not known:
        return " ".join([*lines, "Its runs are not finished."])
    if len(known) <= MANY:
        lines.append("; ".join(f"{part.name}: {shown(part.difference, sign=True)}" for part in known) + ".")
    else:
        given = [part.verdict for part in claim.parts]
        counts = {verdict: given.count(verdict) for verdict in (CONFIRMED, NOT, UNKNOWN)}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        lines.append(f"Of {len(claim.parts)} comparisons: {told} (all of them in the table of comparisons).")
    lines.append(_why(claim))
    if claim.note:
        lines.append(f"{claim.note[0].upper()}{claim.note[1:]}.")
    return " ".join(lines)


def _why(claim: Claim) -> str:
    if claim.verdict == CONFIRMED:
        return "Every interval lies below zero."
    against = [part.name for part in claim.parts if part.verdict == NOT]
    if against:
        return f"The interval lies above zero for {', '.join(against)}."
    single = any(part.difference is None or part.difference.half is None for part in claim.parts)
    return "Too few seeds are finished." if single else "An interval holds zero: these seeds do not decide it."


def winners(results: Results) -> str:
    """At every number of forwards the best diffusion model, and by how much it leads the next."""
    known = variants(scale(results.scale))
    names = [
        name for name, one in known.items() if "frontier" in one.measures and name != "ar" and results.seeds(name)
    ]
    lines = []
    for share in FORWARDS_PER_TOKEN:
        path = ("frontier", f"{share:g}")
        ranked = sorted(
            (value.mean, name) for name in names if (value := results.mean(name, path)) is not None
        )  # fmt: skip
        if not ranked:
            continue
        first = ranked[0][1]
        told = f"{known[first].says}, {shown(results.mean(first, path))}"
        second = next((name for _, name in ranked[1:]), None)
        if second is not None:
            lead = results.difference(first, second, path)
            told += f"; then {known[second].says} ({shown(lead, sign=True)} between them)"
        label = f"1/{round(1 / share)}" if share < 1 else "1"
        lines.append(f"- {label} forward per token: {told}.")
    return "\n".join(lines) or "*(No finished run yet.)*"
