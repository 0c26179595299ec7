"""Optimizers and schedules. The form is that of topic.py."""

GROUP = "Optimizers and schedules"

# {kind: (what is added to the equation, tests of all of that kind)}
LIKE = {
    "optimizer": ("""

update = −lr · (direction + weight_decay · wd_mult · p),  lr = learning_rate · schedule(k) · lr_mult
g is the gradient of the whole step, after clipping; states are float32 unless precision.moments says otherwise.""", (
        "tests/trainer/test_optim.py::test_every_optimizer_reduces_a_quadratic",)),
    "schedule": ("""

k counts updates from 0; the factor is warm-up times shape, and the shape is 1 until the peak.""", (
        "tests/trainer/test_schedules.py::test_traced_equals_host_and_all_lie_between_0_and_1",)),
}

TEXT = """
= optimizer.adamw, adam, adamw: AdamW
A running mean of gradients, divided by the root of a running mean of their squares; weight decay beside it.
equation:
  m ← b1 m + (1 − b1) g,  v ← b2 v + (1 − b2) g²
  direction = m̂ / (√v̂ + eps),  m̂ = m / (1 − b1ᵏ),  v̂ = v / (1 − b2ᵏ),  k updates so far
source: trainer/directions.py adam
source: trainer/optim.py Optimizer.update
test: tests/trainer/test_optim.py::test_adamw_equals_a_hand_written_one_with_decoupled_decay
config: config.optimizer.name = "adamw"
keys: optimizer.learning_rate optimizer.b1 optimizer.b2 optimizer.eps optimizer.weight_decay optimizer.wd_mults
paper: Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015, arXiv 1412.6980
paper: Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019, arXiv 1711.05101
others: PyTorch and optax: b2 is 0.999 by default, and every parameter decays; here embeddings, norms and biases do not,
  by wd_mults.
others: big_vision: weight decay is not multiplied by the learning rate, only by the schedule.
see: exact.clipping schedule.warmup exact.moments
like: optimizer

= optimizer.adafactor, adafactor: Adafactor
Adam without momentum, whose second moment of a matrix is kept as means over rows and over columns.
equation:
  R ← d R + (1 − d) mean over columns of (g² + 1e-30),  C the same over rows,  d = 1 − k^(−decay_exponent)
  u = g / √(R C / mean(R));   direction = u / max(1, RMS(u)),  RMS of each matrix
  smaller sides than min_dim_size_to_factor: the full second moment
source: trainer/directions.py adafactor
test: tests/trainer/test_optim.py::test_adafactor_equals_optax_matrix_by_matrix
config: config.optimizer.name = "adafactor"
keys: optimizer.decay_exponent optimizer.min_dim_size_to_factor
paper: Shazeer, Stern: Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, arXiv 1804.04235,
  algorithm 4
paper: Zhai, Kolesnikov, Houlsby, Beyer: Scaling Vision Transformers, 2021, arXiv 2106.04560, section 3.4
others: optax.adafactor multiplies by the parameter's RMS by default (multiply_by_parameter_scale); here the learning
  rate means what it means for Adam.
others: big_vision: a momentum of 0.9 in bfloat16, d at most 0.999, no division by the RMS.
like: optimizer

= optimizer.muon, muon: Muon, for hidden matrices
Momentum whose matrices are made orthogonal, each layer's and each expert's by itself; embeddings (of tokens, positions
and patches), the output head, routers, gates, norms and biases have AdamW.
equation:
  t ← momentum · t + g;   x = g + momentum · t  (nesterov), else t
  direction = U Vᵀ · 0.2 √max(M, N),  x = U S Vᵀ an M × N matrix, by muon_steps steps of
  X ← 3.4445 X − 4.7750 (X Xᵀ) X + 2.0315 (X Xᵀ)² X   from X = x / |x|
source: trainer/directions.py muon
source: trainer/directions.py orthogonalise
test: tests/trainer/test_optim.py::
  test_orthogonalised_matrices_keep_their_directions_with_singular_values_near_one
test: tests/trainer/test_optim.py::test_muon_updates_have_the_rms_of_adam_updates
test: tests/trainer/test_optim.py::test_muon_serves_hidden_matrices_and_adam_the_rest
config: config.optimizer.name = "muon"
keys: optimizer.momentum optimizer.nesterov optimizer.muon_steps optimizer.muon_exclude optimizer.learning_rate
  optimizer.weight_decay
paper: Jordan et al.: Muon: An optimizer for hidden layers in neural networks, 2024, https://kellerjordan.github.io/posts/muon
paper: Liu et al.: Muon is Scalable for LLM Training, 2025, arXiv 2502.16982, eq. 4 (the factor 0.2 √max(M, N))
others: The first Muon scales by √max(1, out/in) and wants a learning rate of its own; here one learning rate and weight
  decay serve both parts.
like: optimizer

= optimizer.lion, lion: Lion
The sign of a mixture of gradient and momentum: every entry moves by the same amount.
equation:
  direction = sign(b1 m + (1 − b1) g);   then m ← b2 m + (1 − b2) g
source: trainer/directions.py lion
test: tests/trainer/test_optim.py::test_lion_updates_are_signs_of_the_interpolated_momentum
config: config.optimizer.update(name="lion", b2=0.99, learning_rate=1e-4)
keys: optimizer.b1 optimizer.b2 optimizer.learning_rate optimizer.weight_decay
paper: Chen et al.: Symbolic Discovery of Optimization Algorithms, 2023, arXiv 2302.06675
others: The paper has b2 = 0.99, a learning rate 3 to 10 times smaller than AdamW's and a weight decay as many times
  larger; here b2 is AdamW's, 0.95, until it is given.
like: optimizer

= optimizer.sgd, sgd, momentum: gradient descent with momentum
The sum of all gradients, each times the momentum for every step since.
equation:
  t ← momentum · t + g;   direction = g + momentum · t  (nesterov), else t
source: trainer/directions.py sgd
test: tests/trainer/test_optim.py::test_sgd_equals_a_hand_written_one
config: config.optimizer.name = "sgd"
keys: optimizer.momentum optimizer.nesterov
others: PyTorch: the same, with dampening 0; its momentum is 0 and nesterov off by default.
like: optimizer

= schedule.constant, constant: the peak, after the warm-up
For fine-tuning, and for runs whose end is not known.
equation:
  1
source: trainer/schedules.py _constant
test: tests/trainer/test_schedules.py::test_closed_forms
config: config.schedule.name = "constant"
keys: schedule.name
like: schedule

= schedule.linear: down in a line
From the peak to the floor, which the update after the run's last one would have.
equation:
  1 − (1 − floor) t,  t = (k − peak) / (number of updates − peak)
source: trainer/schedules.py _decay
test: tests/trainer/test_schedules.py::test_closed_forms
test: tests/trainer/test_schedules.py::test_the_floor_comes_one_update_after_the_last
config: config.schedule.update(name="linear", floor=0.0)
keys: schedule.floor
others: Transformers: the same, but the first update has a learning rate of 0 where there is a warm-up.
like: schedule

= schedule.cosine, cosine: down in half a cosine
From the peak to the floor, which the update after the run's last one would have.
equation:
  1 − (1 − floor)(1 − cos πt)/2,  t = (k − peak) / (number of updates − peak)
source: trainer/schedules.py _decay @ "cosine": lambda
test: tests/trainer/test_schedules.py::test_closed_forms
test: tests/trainer/test_schedules.py::test_the_floor_comes_one_update_after_the_last
config: config.schedule.name = "cosine"
keys: schedule.floor
paper: Loshchilov, Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, arXiv 1608.03983
others: Transformers and big_vision: the same.
like: schedule

= schedule.wsd, wsd: warm-up, stable, decay
At the peak until the last updates, then down: a run may be continued from its stable part.
equation:
  1, then 1 − (1 − floor) f(t) over the last decay updates;  f(t) = t (linear), √t (sqrt), (1 − cos πt)/2 (cosine)
  t = (k − first) / decay,  first = number of updates − decay;  decay: the last fifth of the run unless given
source: trainer/schedules.py _wsd
test: tests/trainer/test_schedules.py::test_closed_forms
source: trainer/schedules.py _decay
test: tests/trainer/test_schedules.py::test_wsd_shapes
test: tests/trainer/test_schedules.py::test_wsd_without_decay_is_constant
config: config.schedule.update(name="wsd", decay_percent=20.0)
keys: schedule.decay_percent schedule.decay_shape schedule.floor
paper: Hu et al.: MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training Strategies, 2024,
  arXiv 2404.06395
paper: Hägele et al.: Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024, arXiv 2405.18392
others: Transformers' get_wsd_schedule: the same decay. big_vision: cooldown_steps, a line to 0 on top of any schedule.
like: schedule

= schedule.sgdr, sgdr: cosine cycles, each from peak to floor
Each cycle is t_mult times as long as the one before; the one that the run's end cuts short is not compressed.
equation:
  1 − (1 − floor)(1 − cos πt)/2,  t = (k − the cycle's first update) / its length
source: trainer/schedules.py _sgdr
test: tests/trainer/test_schedules.py::test_sgdr_cycles_grow_and_each_goes_from_peak_to_floor
test: tests/trainer/test_schedules.py::test_sgdr_with_equal_cycles
config: config.schedule.update(name="sgdr", cycle_percent=25.0)
keys: schedule.cycle_percent schedule.t_mult schedule.floor
paper: Loshchilov, Hutter: SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, arXiv 1608.03983
others: PyTorch's CosineAnnealingWarmRestarts: the same.
like: schedule

= schedule.rsqrt, rsqrt: one over the square root of time
Needs no end: the run may go on for as long as it likes.
equation:
  1 / √(1 + (k − peak) / timescale), at least floor
source: trainer/schedules.py _rsqrt
test: tests/trainer/test_schedules.py::test_closed_forms
config: config.schedule.update(name="rsqrt", timescale=10_000)
keys: schedule.timescale schedule.floor
paper: Zhai, Kolesnikov, Houlsby, Beyer: Scaling Vision Transformers, 2021, arXiv 2106.04560
others: big_vision: the same with shift 0; its cooldown is a factor on top.
like: schedule

= schedule.warmup, warmup: from nearly nothing to the peak
The first update does something, and update W − 1 has the peak.
equation:
  min(1, (k + 1) / W),  W = warm-up in updates
source: trainer/schedules.py warmup
test: tests/trainer/test_schedules.py::test_warmup
test: tests/trainer/test_schedules.py::test_another_warmup_replaces_only_the_warmup
config: config.schedule.warmup_steps = 100
keys: schedule.warmup_steps schedule.warmup_percent optimizer.group_warmup
others: Transformers, big_vision and optax's warmup_cosine_decay_schedule (from 0): k / W, so that the first update has
  a learning rate of 0.
like: schedule

= optimizer.ema, ema: an average of the parameters
A second set of parameters that follows the trained ones slowly; evaluations use it where it is kept.
equation:
  e ← decay · e + (1 − decay) · p   after every update, in float32
source: trainer/optim.py ema_update
source: trainer/state.py averaged
test: tests/trainer/test_update.py::test_ema_follows_with_its_decay
test: tests/trainer/test_optim.py::test_ema_is_a_weighted_average_in_float32
config: config.optimizer.ema_decay = 0.999
keys: optimizer.ema_decay
"""
