"""Where our values lie in a tensor of a Hugging Face folder, form by form and by hand: whole, in slices, and back."""

import numpy as np
import pytest

from models.hf.entry import make_entry
from models.hf.errors import HFError
from models.hf.family import Tensor
from models.spec_vision import UNBOUNDED


def counted(*shape):
  return np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


INFINITE = np.array([-np.inf, -2.5, 0.0, np.inf], np.float32)
# {form: (the tensor, the shapes of ours, theirs, what ours are of it laid end to end, in their layout)}
FORMS = {
    "one after another": (Tensor("t", ("a", "b")), [(2, 3), (4, 3)], counted(6, 3), lambda t: t),
    "turned": (Tensor("t", "a", transpose=True), [(3, 6)], counted(6, 3), lambda t: t),
    "by groups": (Tensor("t", ("a", "b"), groups=2), [(4, 3), (2, 3)], counted(6, 3), lambda t: t[[0, 1, 3, 4, 2, 5]]),
    "row": (Tensor("t", "a", form="row"), [(1, 5)], counted(5), lambda t: t[None]),
    "taps": (Tensor("t", "a", transpose=True, form="taps"), [(4, 3)], counted(3, 1, 4), lambda t: t[:, 0]),
    "patches": (Tensor("t", "a", transpose=True, form="patches"), [(12, 5)], counted(5, 3, 2, 2),
                lambda t: t.transpose(0, 2, 3, 1).reshape(5, 12)),
    "videos": (Tensor("t", "a", transpose=True, form="videos"), [(24, 5)], counted(5, 3, 2, 2, 2),
              lambda t: t.transpose(0, 2, 3, 4, 1).reshape(5, 24)),
    "alternating": (Tensor("t", ("a", "b"), axis=1, form="alternating"), [(2, 3), (2, 3)], counted(2, 6),
                    lambda t: np.concatenate([t[:, 0::2], t[:, 1::2]], axis=1)),
    "bound": (Tensor("t", "a", form="bound"), [(4,)], INFINITE, lambda t: np.clip(t, -UNBOUNDED, UNBOUNDED)),
}


@pytest.mark.parametrize("form", FORMS)
def test_values_lie_where_the_form_says(form):
  tensor, shapes, theirs, of = FORMS[form]
  paths = (tensor.ours,) if isinstance(tensor.ours, str) else tensor.ours
  entry, expected = make_entry(tensor, dict(zip(paths, shapes, strict=True)), ""), of(theirs)
  assert entry.shape == theirs.shape and entry.matrix_shape == expected.shape
  np.testing.assert_array_equal(entry.to_form(expected), theirs)
  assert np.isfinite(expected).all()
  for part, shape in enumerate(shapes):
    whole = [slice(0, size) for size in shape]
    for dim, size in enumerate(shape):
      for begin, end in ((0, size), (0, 1), (size - 1, size)):
        index = entry.to_theirs(part, (*whole[:dim], slice(begin, end), *whole[dim + 1:]))
        np.testing.assert_array_equal(entry.read(lambda at: theirs[at], index), expected[index], err_msg=f"{index}")


def test_names_count_layers_experts_and_the_layers_that_have_it():
  tensor = Tensor("layers.{layer}.experts.{expert}.w", "w", layers=(2, 5))
  assert list(make_entry(tensor, {"w": (2, 3, 4, 6)}, "model.").names()) == [
      f"model.layers.{layer}.experts.{expert}.w" for layer in (2, 5) for expert in (0, 1, 2)]
  assert list(make_entry(Tensor("w", "w", prefixed=False), {"w": (4,)}, "model.").names()) == ["w"]


@pytest.mark.parametrize("shapes, message", [
    ({"a": (2, 3)}, "t is made of b, which this model does not have"),
    ({"a": (2, 3), "b": (2, 4)}, r"t: a, b cannot be laid end to end, their shapes are \[\(2, 3\), \(2, 4\)\]")])
def test_shapes_that_do_not_fit_are_refused(shapes, message):
  with pytest.raises(HFError, match=message):
    make_entry(Tensor("t", ("a", "b")), shapes, "")
