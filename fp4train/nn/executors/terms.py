"""The GEMMs of a layer whose operands have two terms: a mean that is taken out, a residual.

With μ and ν the means of x and dy over the M tokens of a call, in float32, and q(·) the codes of
what is left, rounded to the recipe's dtype first (Averis, arXiv:2603.10444):

    fprop   y  = q(x − 1·μᵀ)·q(w)ᵀ + 1·(q(w)·μ)ᵀ
    dgrad   dx = q(dy − 1·νᵀ)·q(w) + 1·(νᵀ·q(w))
    wgrad   dw = q(dy − 1·νᵀ)ᵀ·q(x − 1·μᵀ) + M·ν·μᵀ

The other two products of wgrad's sums are zero, since what is left has no mean; the authors make
them of the rounded parts, and quantise μ and ν too. An operand that is not quantised is not
centred; wgrad's last term is the same then.

With Δx = x − v(q(x)) and Δw likewise, r(·) the codes of residuals, and I the in features that have
one (`Residual`):

    fprop   y  = q(x)·q(w)ᵀ + r(Δx[:, I])·q(w)[:, I]ᵀ + q(x)[:, I]·r(Δw[:, I])ᵀ

All terms are added in float32; the bias and one rounding come last. On CPUs they are one product of
BF16 operands where they can be (`joined`): of a mean and of what scales multiply the parts in BF16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import EAGER, Gradients, Saved
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.joined import Term, joined
from fp4train.nn.gathered import values_of
from fp4train.nn.operands import TensorForms
from fp4train.precision.terms import Residual
from fp4train.quantize import Decoded, Quantized, quantizer, tensor_of


class CentredForms(NamedTuple):
    """Both forms of x or dy, and the mean of its tokens, float32 [columns]; None where no product
    takes it.
    """

    row: Prepared | None
    column: Prepared | None
    mean: Tensor | None


class Outer(NamedTuple):
    """A term column·rowᵀ, float32.

    column: [R]; None: ones.
    row: [S].
    """

    column: Tensor | None
    row: Tensor

    def operands(self, rows: int) -> Term:
        """The term as a product, of so many rows."""
        if self.column is None:
            column = self.row.new_ones(rows, dtype=torch.bfloat16)
        else:
            column = self.column
        return Decoded(column.unsqueeze(1), None), Decoded(self.row.unsqueeze(1), None)

    def add_to(self, total: Tensor) -> None:
        """Add the term to a float32 sum [R, S], in place."""
        if self.column is None:
            total += self.row
        else:
            total.addr_(self.column, self.row)


class TermGemms(Gemms):
    """See the module.

    Attributes:
        centres_x, centres_dy: whether the row-wise and the column-wise form are centred.
        adds_means: whether wgrad adds M·ν·μᵀ, which takes the means of both tensors.
        has_backward_terms: whether dgrad or wgrad adds a term; else backward is that of `Gemms`.
        residual: the second terms of fprop's operands; None: there are none.
    """

    def build(self) -> None:
        super().build()
        recipe = self.plan.recipe
        fprop, dgrad, wgrad = (gemm.operands for gemm in self.plan.gemms)
        x = "x" in recipe.centred
        dy = "dy" in recipe.centred
        x_row = x and fprop.first is not None
        if self.x.values is not None:
            x_column = x_row
        else:
            x_column = x and wgrad.second is not None
        self.centres_x = (x_row, x_column)
        self.centres_dy = (dy and dgrad.first is not None, dy and wgrad.first is not None)
        self.adds_means = self.centres_x[1] or self.centres_dy[1]
        self.has_backward_terms = self.adds_means or self.centres_dy[0]
        self.residual = recipe.residual if fprop.quantised else None
        self.route = EAGER  # the operator of compiled graphs saves one form of x

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        if self.centres_x[0]:
            x_MK = without_mean(x_MK, mean_of(x_MK))
        return x_MK, w_NK

    def forward(
        self,
        x_MK: Tensor,
        w_NK: Tensor,
        bias_N: Tensor | None,
        call: LayerCall,
    ) -> tuple[Tensor, Saved]:
        """As `Gemms.forward`; the mean of x is saved too."""
        x_MK = x_MK.to(self.dtype)
        gradients = call.gradients
        keeps_codes = gradients.w is not None and not self.keeps_x
        forms = self._forms_of_x(x_MK, call, keeps_codes)
        assert forms.row is not None
        w = call.weights.prepared(w_NK, self.w_row, call)
        outer = None
        x_MK_coded = x_MK
        if self.centres_x[0]:
            assert forms.mean is not None
            outer = Outer(None, self.row_of_mean("fprop", as_row(forms.mean), w))
            if self.residual is not None:
                x_MK_coded = without_mean(x_MK, forms.mean)
        further: list[Term] = []
        if self.residual is not None:
            x = x_MK_coded, forms.row
            further = self._residuals(self.residual, x, (w_NK, w), forms, call)
        y_MN = self._sum("fprop", (forms.row, w), outer, further, bias=bias_N)
        saved_w = None if gradients.x is None else w_NK
        if gradients.w is None:
            return y_MN, (saved_w, None, None)
        column = forms.column
        assert not isinstance(column, Decoded)  # what is saved is prepared as codes
        return y_MN, (saved_w, x_MK if self.keeps_x else column, forms.mean)

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        w_NK, x, mean_K = saved
        if not self.has_backward_terms:
            return super().backward(dy_MN, (w_NK, x), call, total)
        dy = dy_MN.to(self.dtype)
        gradients = call.gradients
        wants = (gradients.x is not None, gradients.w is not None)
        forms = self._forms(self.dy, dy, self.centres_dy, call, *wants)
        dx_MK = dw_NK = dbias_N = None
        if forms.row is not None:
            assert isinstance(w_NK, Tensor) and gradients.x is not None
            w = call.weights.prepared(w_NK, self.w_column, call)
            if self.values_of_w is not None:
                w = Decoded(self.values_of_w(w, self.dtype).T, None)
            outer = None
            if self.centres_dy[0]:
                assert forms.mean is not None
                outer = Outer(None, self.row_of_mean("dgrad", as_row(forms.mean), w))
            dx_MK = self._sum("dgrad", (forms.row, w), outer).to(gradients.x)
        if forms.column is not None:
            assert x is not None and gradients.w is not None
            outer = None
            if self.adds_means:
                assert isinstance(mean_K, Tensor) and forms.mean is not None
                outer = Outer(forms.mean * dy.shape[0], mean_K)
            dw_NK = self._sum(
                "wgrad",
                (forms.column, self._x_of_wgrad(x)),
                outer,
                out_dtype=self.dw_dtype if total is None else torch.float32,
            )
            if total is None:
                dw_NK = dw_NK.to(gradients.w)
            else:
                total += dw_NK
                dw_NK = None
        if gradients.bias is not None:
            dbias_N = dy.sum(0, dtype=torch.float32).to(gradients.bias)
        return dx_MK, dw_NK, dbias_N

    def _x_of_wgrad(self, x: Prepared | Tensor) -> Prepared:
        """The operand x of wgrad from what forward saved."""
        if self.x.values is not None and isinstance(x, Quantized):
            x = self.x.values(x, self.dtype)
        return Decoded(x.T, None) if isinstance(x, Tensor) else x

    def _forms_of_x(self, x_MK: Tensor, call: LayerCall, keeps_codes: bool) -> CentredForms:
        """The forms of x; consecutive layers that read the same tensor share them, as in
        `Gemms.forward`.
        """
        shared: dict[str, Any] | None = None
        if self.x.pure and not x_MK.is_inference():
            shared = call.shared
        wants = (self.x.wants[keeps_codes], self.centres_x, self.adds_means)
        seen = None if shared is None else shared.get("terms")
        if seen is not None and seen[:2] == (wants, x_MK._version) and seen[2].is_set_to(x_MK):
            earlier: CentredForms = seen[3]
            return earlier
        forms = self._forms(self.x, x_MK, self.centres_x, call, True, keeps_codes)
        if shared is not None:
            shared["terms"] = (wants, x_MK._version, x_MK, forms)
        return forms

    def _forms(
        self,
        forms: TensorForms,
        x_MK: Tensor,
        centres: tuple[bool, bool],
        call: LayerCall,
        row: bool,
        column: bool,
    ) -> CentredForms:
        """The forms of x or dy that are asked for, each of the tensor without its mean or as it
        is.
        """
        if not any(centres):
            mean = mean_of(x_MK) if self.adds_means else None
            return CentredForms(*forms.prepare(x_MK, call, row, column), mean)
        mean = mean_of(x_MK)
        if all(centres):
            tensor = without_mean(x_MK, mean)
            return CentredForms(*forms.prepare(tensor, call, row, column), mean)
        centred = without_mean(x_MK, mean)
        of_rows, of_columns = (centred, x_MK) if centres[0] else (x_MK, centred)
        return CentredForms(
            forms.prepare(of_rows, call, row, False)[0],
            forms.prepare(of_columns, call, False, column)[1],
            mean,
        )

    def row_of_mean(self, gemm: str, mean: Decoded, w: Prepared) -> Tensor:
        """The product of a mean, an operand of one row, and w: float32 [S]."""
        backend: Backend = getattr(self, gemm)
        return backend.product(mean, w, out_dtype=torch.float32)[0]

    def _sum(
        self,
        gemm: str,
        operands: tuple[Prepared, Prepared],
        outer: Outer | None,
        further: Sequence[Term] = (),
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """a·bᵀ, further terms and a bias, rounded once.

        Args:
            out_dtype: dtype of the result; None: the recipe's.
        """
        backend: Backend = getattr(self, gemm)
        out_dtype = out_dtype or self.dtype
        if outer is None and not further:
            return backend.product(*operands, out_dtype=out_dtype, bias=bias)
        if out_dtype is torch.bfloat16 and not backend.takes_codes:
            a, b = map(decoded, operands)
            terms: list[Term] = []
            if outer is not None:
                terms.append(outer.operands(len(a.values)))
            terms += further
            both = joined([(a, b), *terms])
            if both is not None:
                return self.joined_product(gemm, (operands, terms), both, bias)
        total = backend.product(*operands, out_dtype=torch.float32)
        if outer is not None:
            outer.add_to(total)
        for term in further:
            total += backend.product(*term, out_dtype=torch.float32)
        if bias is not None:
            total += bias.to(self.dtype)
        return total.to(out_dtype)

    def joined_product(
        self,
        gemm: str,
        terms: tuple[tuple[Prepared, Prepared], Sequence[Term]],
        operands: Term,
        bias: Tensor | None,
    ) -> Tensor:
        """The product of operands in which these terms are joined."""
        backend: Backend = getattr(self, gemm)
        return backend.product(*operands, out_dtype=self.dtype, bias=bias)

    def _residuals(
        self,
        residual: Residual,
        x: tuple[Tensor, Prepared],
        w: tuple[Tensor, Prepared],
        forms: CentredForms,
        call: LayerCall,
    ) -> list[Term]:
        """The operands of the second terms of fprop.

        Args:
            x, w: the tensor [M, K] or [N, K] and its row-wise form.
            forms: the forms of x, by which layers that read the same x share its residual.
        """
        remainders = {}
        if "x" in residual.tensors:
            shared: dict[str, Any] = {} if call.shared is None else call.shared
            if shared.get("residual", (None,))[0] is not forms:
                shared["residual"] = (forms, remainder(*x))
            remainders["x"] = shared["residual"][1]
        if "w" in residual.tensors:
            remainders["w"] = remainder(values_of(w[0], w[0].dtype).detach(), w[1])
        channels = None
        if residual.share < 1:
            means = [values.abs().mean(0) for values in remainders.values()]
            largest = torch.stack(means).sum(0).sort(descending=True, stable=True).indices
            channels = largest[: residual.count(len(largest))].sort().values
        factors = {"x": decoded(w[1]), "w": decoded(x[1])}
        terms: list[Term] = []
        for name, values in remainders.items():
            factor = factors[name]
            if channels is not None:
                values = values.index_select(1, channels)
                factor = Decoded(factor.values.index_select(1, channels), factor.scale)
            if residual.spec is None:
                term = Decoded(values.to(self.dtype), None)
            else:
                term = quantizer(residual.spec, values.device.type).values(values)
            terms.append((term, factor) if name == "x" else (factor, term))
        return terms


def decoded(operand: Prepared) -> Decoded:
    """The values of an operand."""
    if isinstance(operand, Quantized):
        return quantizer(operand.spec, operand.codes.device.type).decode(operand)
    return operand


def remainder(tensor: Tensor, form: Prepared) -> Tensor:
    """What the codes of a tensor leave of it, float32."""
    values = tensor.to(torch.float32, copy=True)
    values -= tensor_of(form, torch.float32)
    return values


def mean_of(x_MK: Tensor) -> Tensor:
    """The mean over tokens, float32 [K]; 0 where there are none."""
    total = x_MK.detach().sum(0, dtype=torch.float32)
    return total / total.new_full((), max(len(x_MK), 1))  # CUDA multiplies by 1 over a number


def without_mean(x_MK: Tensor, mean_K: Tensor) -> Tensor:
    """x − 1·meanᵀ, subtracted in float32, in the dtype of x."""
    if x_MK.is_cpu and x_MK.dtype is torch.bfloat16 and x_MK.numel() and x_MK.is_contiguous():
        # one pass; x / √1 − mean
        return F.batch_norm(x_MK.detach(), mean_K, torch.ones_like(mean_K), eps=0.0)
    return (x_MK.float() - mean_K).to(x_MK.dtype)


def as_row(mean_K: Tensor) -> Decoded:
    """The mean as an operand of one row, in float32."""
    return Decoded(mean_K.unsqueeze(0), None)
