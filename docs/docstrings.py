"""Lets the site render docstrings: reST roles and formulas in them become Markdown and MathML."""

from __future__ import annotations

import inspect
import pydoc
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

# :class:`HaloLoader`, :meth:`~Edges.factor`
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|obj|exc):`~?([^`]+)`")
_INLINE = re.compile(r":math:`([^`]+)`", re.DOTALL)
# Only the plural is read as a section of doctests.
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
# A directive with its formula on the same line or indented below it.
_BLOCK = re.compile(r"^( *)\.\. math::[ ]*(.*)\n((?:\1[ ]+\S.*\n?|[ ]*\n)*)", re.MULTILINE)


def to_markdown(text: str) -> str:
    r"""The text with roles as code and formulas as MathML, which browsers show by themselves.

    Example:
        >>> to_markdown("see :func:`infer`")
        'see `infer`'
        >>> to_markdown(r":math:`\ell`").startswith("<span><math")
        True
    """

    def block(match: re.Match[str]) -> str:
        formula = " ".join([match[2], *textwrap.dedent(match[3]).split("\n")]).strip()
        return f"{match[1]}<p>{convert(formula, display='block')}</p>\n\n"

    text = _EXAMPLE.sub("Examples:", _BLOCK.sub(block, text))
    # In a span, since Markdown takes a line that begins with <math> for a block.
    text = _INLINE.sub(lambda match: f"<span>{convert(' '.join(match[1].split()))}</span>", text)
    return _ROLE.sub(r"`\1`", text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is taken apart."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute that is read."""
        if obj.docstring is None:
            return
        if "{options}" in obj.docstring.value:
            _fill_in_options(obj, obj.docstring)
        obj.docstring.value = to_markdown(obj.docstring.value)


def _fill_in_options(obj: griffe.Object, docstring: griffe.Docstring) -> None:
    """Take a docstring and a signature as they are at run time, with all options."""
    value: Any = pydoc.locate(obj.path)
    docstring.value = inspect.getdoc(value) or ""
    if isinstance(obj, griffe.Function):
        obj.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=inspect.formatannotation(parameter.annotation).strip("'"),
                    kind=griffe.ParameterKind(parameter.kind.description),
                    default=None if parameter.default is parameter.empty else repr(parameter.default),
                )
                for parameter in inspect.signature(value).parameters.values()
            )
        )
