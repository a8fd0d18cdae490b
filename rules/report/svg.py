"""SVG elements as escaped text. What came from a run enters a picture through here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Return one element. ``class_`` is ``class``, ``_`` in a name is ``-``, None leaves an attribute out.

    Children and attributes are escaped unless they are :class:`~markupsafe.Markup` already.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), number(value) if _is_number(value) else value)
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inner)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def number(value: str | float | None) -> str:
    """Return a coordinate with a tenth of a pixel."""
    text = f"{float(value or 0):.1f}"
    return text.removesuffix(".0")


def percent(share: float) -> str:
    """Return a place between the left and the right edge, so that a picture can be of any width."""
    return f"{100 * share:.2f}%"


def path(pieces: Iterable[Iterable[tuple[float, float]]]) -> str:
    """Return path data of polylines; one point alone becomes a dot (a round cap makes it visible)."""
    written = []
    for piece in pieces:
        points = [f"{number(x)} {number(y)}" for x, y in piece]
        if len(points) == 1:
            written.append(f"M{points[0]}h0")
        elif points:
            written.append("M" + "L".join(points))
    return "".join(written)
