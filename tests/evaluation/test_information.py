"""Entropy and its relatives against axioms, identities and other libraries; estimators against known values."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.integrate import quad

from lopsided.errors import InputError
from lopsided.information import (
    conditional_cross_entropy,
    conditional_differential_entropy,
    conditional_entropy,
    cross_entropy,
    differential_entropy,
    empirical_distribution,
    entropy,
    feature_information,
    joint_entropy,
    kl_divergence,
    mutual_information,
)
from lopsided.seeds import derive_seed

quick = settings(max_examples=60, deadline=None)
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.floats(0.1, 1.0))


def generator(*names):
    return np.random.default_rng(derive_seed(0, "information", *names))


def normalised(weights):
    array = np.asarray(weights, dtype=float)
    assume(array.sum() > 0)
    return array / array.sum()


@st.composite
def distributions(draw, min_size=1, max_size=6):
    return normalised(draw(st.lists(WEIGHT, min_size=min_size, max_size=max_size)))


@st.composite
def pairs(draw):
    size = draw(st.integers(1, 6))
    return draw(distributions(size, size)), draw(distributions(size, size))


@st.composite
def tables(draw, min_rows=1):
    rows, columns = draw(st.integers(min_rows, 5)), draw(st.integers(1, 5))
    return normalised(draw(distributions(rows * columns, rows * columns))).reshape(rows, columns)


def assert_same(a, b):
    assert_allclose(a, b, rtol=1e-9, atol=1e-11)


class TestAxioms:
    """The six axioms of the appendix, which determine entropy."""

    def test_normalization_a_fair_coin_has_one_bit(self):
        assert entropy([0.5, 0.5]) == 1.0

    @quick
    @given(distributions(), st.randoms())
    def test_invariance_only_the_probabilities_matter_not_what_carries_them(self, p, random):
        order = list(range(len(p)))
        random.shuffle(order)
        assert entropy(p[order]) == entropy(p)

    @quick
    @given(distributions())
    def test_maximality_the_uniform_distribution_has_the_most(self, p):
        assert entropy(p) <= entropy(np.full(len(p), 1 / len(p))) + 1e-12

    @quick
    @given(distributions(), st.integers(0, 3), st.integers(0, 6))
    def test_extensibility_impossible_outcomes_add_nothing(self, p, count, place):
        assert entropy(np.insert(p, min(place, len(p)), np.zeros(count))) == entropy(p)

    @quick
    @given(tables())
    def test_additivity_joint_is_marginal_plus_conditional(self, pxy):
        assert_same(joint_entropy(pxy), entropy(pxy.sum(axis=1)) + conditional_entropy(pxy))
        assert_same(joint_entropy(pxy), entropy(pxy.sum(axis=0)) + conditional_entropy(pxy, given=1))

    @quick
    @given(pairs(), st.floats(1e-9, 1e-2))
    def test_continuity_a_small_step_of_the_probabilities_is_a_small_step_of_entropy(self, pair, step):
        p, q = pair
        moved = (1 - step) * p + step * q
        # Fannes and Audenaert: the sharp bound of the change at total-variation distance t <= step.
        bound = step * math.log2(max(len(p) - 1, 1)) + entropy([step, 1 - step])
        assert abs(entropy(moved) - entropy(p)) <= bound + 1e-12


class TestIdentities:
    @quick
    @given(distributions(), st.sampled_from([2, math.e, 10]))
    def test_entropy_is_the_printed_sum_and_that_of_scipy(self, p, base):
        by_hand = -sum(value * math.log(value) / math.log(base) for value in p if value > 0)
        assert_allclose(entropy(p, base=base), by_hand, rtol=1e-12, atol=1e-14)
        assert_allclose(entropy(p, base=base), scipy.stats.entropy(p, base=base), rtol=1e-12, atol=1e-14)

    @quick
    @given(tables())
    def test_conditional_entropy_is_the_average_over_rows(self, pxy):
        marginal = pxy.sum(axis=1)
        rows = [mass * entropy(row / mass) for mass, row in zip(marginal, pxy, strict=True) if mass > 0]
        assert_same(conditional_entropy(pxy), sum(rows))

    @quick
    @given(tables())
    def test_conditioning_never_adds_entropy(self, pxy):
        assert conditional_entropy(pxy) <= entropy(pxy.sum(axis=0)) + 1e-12

    @quick
    @given(tables())
    def test_mutual_information_is_symmetric_nonnegative_and_both_differences(self, pxy):
        information = mutual_information(pxy)
        assert information >= 0
        assert_same(mutual_information(pxy.T), information)
        assert_same(entropy(pxy.sum(axis=1)) - conditional_entropy(pxy, given=1), information)
        assert_same(entropy(pxy.sum(axis=0)) - conditional_entropy(pxy), information)
        assert_same(kl_divergence(pxy.ravel(), np.outer(pxy.sum(axis=1), pxy.sum(axis=0)).ravel()), information)

    @quick
    @given(distributions(), distributions())
    def test_independent_variables_share_nothing_and_their_entropies_add(self, p, q):
        table = np.outer(p, q)
        assert mutual_information(table) < 1e-12
        assert_same(joint_entropy(table), entropy(p) + entropy(q))
        assert_same(conditional_entropy(table), entropy(q))

    @quick
    @given(distributions(), distributions(), distributions())
    def test_joint_entropy_of_three_independent_variables_adds_up(self, p, q, r):
        table = np.einsum("i,j,k->ijk", p, q, r)
        assert_same(joint_entropy(table), entropy(p) + entropy(q) + entropy(r))

    @quick
    @given(distributions())
    def test_a_variable_tells_everything_about_itself(self, p):
        assert_same(mutual_information(np.diag(p)), entropy(p))
        assert conditional_entropy(np.diag(p)) == 0

    @quick
    @given(pairs())
    def test_divergence_is_nonnegative_and_that_of_scipy(self, pair):
        p, q = pair
        assert kl_divergence(p, q) >= 0
        assert_allclose(kl_divergence(p, q), scipy.stats.entropy(p, q, base=2), rtol=1e-9, atol=1e-14)
        assert kl_divergence(p, p) == 0
        if np.abs(p - q).max() > 1e-3:  # Pinsker: D >= 2 TV^2 nats
            assert kl_divergence(p, q) > 0

    @quick
    @given(pairs())
    def test_cross_entropy_is_entropy_plus_divergence(self, pair):
        p, q = pair
        assert_same(cross_entropy(p, q), entropy(p) + kl_divergence(p, q))
        assert_same(cross_entropy(p, p), entropy(p))

    @quick
    @given(pairs())
    def test_divergence_is_infinite_exactly_where_the_estimate_excludes_what_happens(self, pair):
        p, q = pair
        excluded = bool(((q == 0) & (p > 0)).any())
        assert math.isinf(kl_divergence(p, q)) == excluded
        assert math.isinf(cross_entropy(p, q)) == excluded

    def test_divergence_is_not_symmetric(self):
        assert kl_divergence([0.9, 0.1], [0.5, 0.5]) != kl_divergence([0.5, 0.5], [0.9, 0.1])

    def test_the_tiniest_probability_is_not_taken_for_zero(self):
        assert_allclose(kl_divergence([0.5, 0.5], [1.0, 5e-324]), 1074 / 2 - 1, rtol=1e-12)
        corner = np.array([[1.0, 0.0], [0.0, 1e-200]])
        assert_allclose(mutual_information(corner), 1e-200 * 200 * math.log2(10), rtol=1e-9)


class TestConditionalCrossEntropy:
    """Eqs. (19) and (20), with the conditional probability in the place of the printed joint one."""

    @quick
    @given(tables(), st.data())
    def test_it_is_the_average_cross_entropy_over_features(self, pzy, data):
        q = np.stack([data.draw(distributions(pzy.shape[1], pzy.shape[1])) for _ in pzy])
        rows = [
            mass * cross_entropy(row / mass, guess)
            for mass, row, guess in zip(pzy.sum(axis=1), pzy, q, strict=True)
            if mass > 0
        ]
        assert_same(conditional_cross_entropy(pzy, q), sum(rows))

    @quick
    @given(tables(), st.data())
    def test_its_least_value_over_classifiers_is_the_conditional_entropy(self, pzy, data):
        marginal = pzy.sum(axis=1, keepdims=True)
        uniform = np.full_like(pzy, 1 / pzy.shape[1])
        best = np.divide(pzy, marginal, out=uniform, where=marginal > 0)
        least = conditional_cross_entropy(pzy, best)
        assert_same(least, conditional_entropy(pzy))
        other = np.stack([data.draw(distributions(pzy.shape[1], pzy.shape[1])) for _ in pzy])
        assert conditional_cross_entropy(pzy, other) >= least - 1e-12
        # So the right side of Eq. (20) is that of Eq. (18): minus the mutual information.
        assert_same(least - entropy(pzy.sum(axis=0)), -mutual_information(pzy))

    @quick
    @given(tables())
    def test_the_printed_joint_probability_would_add_the_entropy_of_the_features(self, pzy):
        q = np.full_like(pzy, 1 / pzy.shape[1])
        joint_of_prediction = pzy.sum(axis=1, keepdims=True) * q
        as_printed = -sum(
            p * math.log2(guess) for p, guess in zip(pzy.ravel(), joint_of_prediction.ravel(), strict=True) if p > 0
        )
        assert_same(as_printed, conditional_cross_entropy(pzy, q) + entropy(pzy.sum(axis=1)))

    def test_predictions_for_samples_give_the_log_loss(self):
        predicted = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
        y = np.array([0, 2, 1])
        by_hand = -(math.log(0.7) + math.log(0.8) + math.log(0.4)) / 3
        assert_allclose(conditional_cross_entropy(np.eye(3)[y] / 3, predicted, base=math.e), by_hand)


class TestSamples:
    @quick
    @given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1, max_size=40))
    def test_frequencies_are_counts_over_the_number_of_samples(self, samples):
        x, y = (list(column) for column in zip(*samples, strict=True))
        table = empirical_distribution(x, y)
        for (i, a), (j, b) in itertools.product(enumerate(sorted(set(x))), enumerate(sorted(set(y)))):
            assert table[i, j] == samples.count((a, b)) / len(samples)
        assert_allclose(table.sum(axis=1), empirical_distribution(x))

    @quick
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
    def test_mutual_information_of_labels_is_that_of_scikit_learn(self, samples):
        metrics = pytest.importorskip("sklearn.metrics")
        x, y = (list(column) for column in zip(*samples, strict=True))
        ours = mutual_information(empirical_distribution(x, y), base=math.e)
        assert_allclose(ours, metrics.mutual_info_score(x, y), atol=1e-12)

    def test_classes_fix_the_order_and_keep_a_place_for_what_is_absent(self):
        assert empirical_distribution(["b", "a", "b", "b"], classes=[["b", "c", "a"]]).tolist() == [0.75, 0.0, 0.25]
        table = empirical_distribution([True, True], [1, 0], classes=[[False, True], [0, 1, 2]])
        assert table.tolist() == [[0, 0, 0], [0.5, 0.5, 0]]

    def test_text_columns_of_data_frames_are_labels(self):
        assert empirical_distribution(np.array(["x", "y", "x", "x"], dtype=object)).tolist() == [0.75, 0.25]


def gaussian_entropy(covariance):
    """Bits."""
    d = len(covariance)
    return 0.5 * (d * math.log2(2 * math.pi * math.e) + np.linalg.slogdet(covariance)[1] / math.log(2))


def sphere_area(d):
    """Area of the unit sphere in d dimensions."""
    return 2 * math.pi ** (d / 2) / math.gamma(d / 2)


def uniform_on_sphere(n, d):
    z = generator("sphere", n, d).normal(size=(n, d))
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def two_gaussians_information(distance):
    """I(Z; Y) in bits of two equally frequent unit normals on a line, by quadrature: H(Z) - H(Z | Y)."""

    def term(x):
        density = (scipy.stats.norm.pdf(x) + scipy.stats.norm.pdf(x - distance)) / 2
        return -density * math.log2(density) if density > 0 else 0.0

    return quad(term, -12, distance + 12, limit=200)[0] - gaussian_entropy(np.eye(1))


class TestEstimators:
    @pytest.mark.parametrize(
        ("d", "k", "tolerance"), [(1, 1, 0.08), (1, 3, 0.06), (2, 3, 0.06), (3, 3, 0.08), (5, 3, 0.12), (5, 10, 0.25)]
    )
    def test_gaussians_have_their_known_entropy(self, d, k, tolerance):
        rng = generator("gaussian", d, k)
        mix = np.eye(d) + 0.3 * rng.normal(size=(d, d))
        z = rng.normal(size=(4000, d)) @ mix.T
        assert abs(differential_entropy(z, k=k) - gaussian_entropy(mix @ mix.T)) < tolerance

    def test_the_error_shrinks_with_the_number_of_samples(self):
        def error(n):
            estimates = [differential_entropy(generator("size", n, r).normal(size=(n, 2))) for r in range(20)]
            return math.sqrt(np.mean((np.array(estimates) - gaussian_entropy(np.eye(2))) ** 2))

        assert error(1600) < 0.5 * error(100)

    @pytest.mark.parametrize("d", [2, 3, 5])
    def test_uniform_features_on_the_sphere_have_the_logarithm_of_its_area(self, d):
        z = uniform_on_sphere(4000, d)
        assert abs(differential_entropy(z, dimension=d - 1) - math.log2(sphere_area(d))) < 0.08

    @quick
    @given(st.floats(0.01, 100), st.integers(0, 20))
    def test_scaling_adds_its_logarithm_per_dimension(self, scale, seed):
        z = generator("scale", seed).normal(size=(40, 3))
        assert_allclose(differential_entropy(scale * z), differential_entropy(z) + 3 * math.log2(scale), atol=1e-9)

    @quick
    @given(st.integers(0, 20))
    def test_shifting_and_rotating_change_nothing(self, seed):
        rng = generator("move", seed)
        z, y = rng.normal(size=(40, 3)), rng.integers(0, 2, size=40)
        rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        moved = z @ rotation + 5.0
        assert_allclose(differential_entropy(moved), differential_entropy(z), atol=1e-9)
        assert_allclose(feature_information(moved, y), feature_information(z, y), atol=1e-9)

    def test_bases_differ_by_a_factor(self):
        z, y = generator("base").normal(size=(50, 2)), [0, 1] * 25
        for estimate in (differential_entropy(z), conditional_differential_entropy(z, y), feature_information(z, y)):
            assert estimate != 0
        assert_allclose(differential_entropy(z, base=math.e), differential_entropy(z) * math.log(2))
        nats = conditional_differential_entropy(z, y, base=math.e)
        assert_allclose(nats, conditional_differential_entropy(z, y) * math.log(2))
        assert_allclose(feature_information(z, y, base=4), feature_information(z, y) / 2)

    def test_conditional_entropy_averages_the_classes_by_their_share(self):
        rng = generator("conditional")
        y = np.repeat(["rare", "common"], [500, 3500])
        spread = np.where(y == "rare", 0.1, 1.0)[:, None]
        z = spread * rng.normal(size=(4000, 2))
        known = gaussian_entropy(np.eye(2)) + 2 * math.log2(0.1) * 500 / 4000
        assert abs(conditional_differential_entropy(z, y) - known) < 0.06

    @pytest.mark.parametrize("distance", [0.0, 1.0, 3.0, 20.0])
    def test_information_of_two_gaussians_is_that_of_quadrature(self, distance):
        rng = generator("information", int(distance))
        y = np.repeat([0, 1], 2000)
        z = rng.normal(size=(4000, 1)) + distance * y[:, None]
        assert abs(feature_information(z, y) - two_gaussians_information(distance)) < 0.04

    @pytest.mark.parametrize("d", [1, 8, 16])
    def test_independent_features_carry_no_information_in_any_dimension(self, d):
        rng = generator("independent", d)
        assert abs(feature_information(rng.normal(size=(2000, d)), rng.integers(0, 3, size=2000))) < 0.06

    def test_independent_features_show_why_information_is_no_difference_of_entropies(self):
        rng = generator("difference")
        z, y = rng.normal(size=(2000, 16)), rng.choice(3, size=2000, p=[0.5, 0.3, 0.2])
        difference = differential_entropy(z) - conditional_differential_entropy(z, y)
        assert -0.4 < difference < -0.2
        assert abs(feature_information(z, y)) < 0.05
        ten = rng.integers(0, 10, size=2000)  # The same features in more classes have a larger error.
        assert differential_entropy(z) - conditional_differential_entropy(z, ten) < 1.5 * difference

    def test_separated_classes_carry_all_the_information_of_the_labels(self):
        y = np.repeat([0, 1, 2], [600, 300, 100])
        z = generator("separated").normal(size=(1000, 2)) + 100.0 * y[:, None]
        assert abs(feature_information(z, y) - entropy([0.6, 0.3, 0.1])) < 0.01

    def test_information_does_not_care_on_which_surface_the_features_lie(self):
        rng = generator("surface")
        y = rng.integers(0, 2, size=1000)
        line = rng.normal(size=(1000, 1)) + 2.0 * y[:, None]
        embedded = line @ np.array([[0.6, 0.8, 0.0]])
        assert_allclose(feature_information(embedded, y), feature_information(line, y), atol=1e-9)

    def test_information_of_collapsed_features_is_that_of_their_distribution(self):
        rng = generator("collapsed")
        y = rng.integers(0, 2, size=3000)
        code = np.where(rng.random(3000) < 0.8, y, 2)
        exact = mutual_information(empirical_distribution(code, y))
        assert abs(feature_information(np.eye(3)[code], y) - exact) < 0.01

    def test_fewer_coinciding_samples_than_k_are_no_error(self):
        z = generator("ties").normal(size=(50, 2))
        z[1] = z[0]
        assert math.isfinite(differential_entropy(z))


def refused(call, *args, **options):
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    return str(caught.value)


GRID = np.arange(20.0).reshape(10, 2)
HALVES = [0, 1] * 5


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "arguments", "text"),
        [
            (entropy, ([0.5, 0.6],), "p must sum to 1, got 1.1. Divide counts by their sum."),
            (entropy, ([3, 1],), "p must sum to 1, got 4. Divide counts by their sum."),
            (entropy, ([1.5, -0.5],), "p must not hold negative probabilities, got -0.5."),
            (entropy, ([0.5, math.nan],), "p must be finite, got nan."),
            (entropy, (["a", "b"],), "p must hold real numbers, got <U1."),
            (entropy, ([[0.5], [0.25, 0.25]],), "p must be a rectangular array, got rows of different lengths."),
            (
                entropy,
                ([[0.5, 0.5]],),
                "p must be a vector of probabilities, got shape (1, 2). "
                "Turn labels into probabilities with empirical_distribution.",
            ),
            (
                mutual_information,
                ([0.5, 0.5],),
                "pxy must be a table with two axes of probabilities, got shape (2,). "
                "Turn labels into probabilities with empirical_distribution.",
            ),
            (
                joint_entropy,
                ([0.5, 0.5],),
                "pxy must be a table with two axes or more of probabilities, got shape (2,). "
                "Turn labels into probabilities with empirical_distribution.",
            ),
            (
                kl_divergence,
                ([0.5, 0.5], [1.0]),
                "q must have the shape of p (2,), got (1,). Give impossible outcomes probability 0.",
            ),
            (cross_entropy, ([0.5, 0.5], [0.5, 0.4]), "q must sum to 1, got 0.9. Divide counts by their sum."),
            (
                conditional_cross_entropy,
                ([[0.5, 0.5]], [[0.25, 0.25]]),
                "every row of q must sum to 1, got 0.5 in row 0. "
                "Divide each row by its sum: q holds p(y | z), not the joint table.",
            ),
            (
                conditional_cross_entropy,
                ([[0.5, 0.5]], [[1.0]]),
                "q must have the shape of pzy (1, 2), got (1, 1). Give impossible outcomes probability 0.",
            ),
            (
                empirical_distribution,
                (),
                "labels must hold at least one array, got none. Pass the labels of the samples.",
            ),
            (empirical_distribution, ([0, 1], [0]), "all arrays of labels must have the same length, got [2, 1]."),
            (
                empirical_distribution,
                ([],),
                "labels must be a vector with at least one entry, got shape (0,). Give one per sample.",
            ),
            (
                empirical_distribution,
                ([0.0, math.nan],),
                "labels must not be NaN, got 1 of 2. Drop those samples.",
            ),
            (
                empirical_distribution,
                (np.array(["a", math.nan, math.nan], dtype=object),),
                "labels must not be NaN, got 2 of 3. Drop those samples.",
            ),
            (
                empirical_distribution,
                (np.array([None, "a"], dtype=object),),
                "labels must be integers, floats, booleans or strings, got object.",
            ),
            (
                differential_entropy,
                ([1.0, 2.0],),
                "z must have shape (n, d), got shape (2,). Give one row per sample; z[:, None] if d = 1.",
            ),
            (differential_entropy, ([[math.inf]],), "z must be finite, got inf."),
            (
                differential_entropy,
                (GRID[:3],),
                "z must hold more than k = 3 samples, got 3. Use a smaller k or more samples.",
            ),
            (
                differential_entropy,
                (np.repeat(GRID[:2], [4, 6], axis=0),),
                "no more than k = 3 features may coincide, "
                "got 10 samples at distance 0 from their 3 nearest neighbours. "
                "Features without a density have no differential entropy: drop duplicates or use a larger k.",
            ),
            (conditional_differential_entropy, (GRID, [0, 1]), "y must hold one label per sample (10), got 2."),
            (
                conditional_differential_entropy,
                (GRID, ["a"] * 7 + ["b"] * 3),
                "every class must hold more than k = 3 samples, got 3 of class 'b'. "
                "Use a smaller k, or omit this class.",
            ),
            (
                feature_information,
                (GRID, [0] * 9 + [1]),
                "every class must hold more than k = 3 samples, got 1 of class 1. Use a smaller k, or omit this class.",
            ),
        ],
    )
    def test_each_bad_argument_has_its_sentence(self, call, arguments, text):
        assert refused(call, *arguments) == text

    def test_each_bad_option_has_its_sentence(self):
        for base in (1, 0, math.nan, math.inf):
            text = f"base must be a finite number > 1, got {base!r}. Use 2 for bits, math.e for nats."
            assert refused(entropy, [1.0], base=base) == text
        assert refused(conditional_entropy, [[1.0]], given=2) == "given must be 0 (rows) or 1 (columns), got 2."
        for k in (0, 1.5):
            text = f"k must be an integer >= 1, got {k}. 3 is a good start."
            assert refused(differential_entropy, GRID, k=k) == text
            assert refused(feature_information, GRID, HALVES, k=k) == text
        text = "dimension must be an integer from 1 to d = 2, got 3. Use d - 1 for features on the unit sphere."
        assert refused(differential_entropy, GRID, dimension=3) == text
        text = (
            "classes must hold one sequence per array of labels (1), got 2. Write classes=[[...]] for a single array."
        )
        assert refused(empirical_distribution, [0, 1], classes=[0, 1]) == text
        text = "every label must be one of the classes, got 'c'. Classes: ['a', 'b']."
        assert refused(empirical_distribution, ["a", "c"], classes=[["a", "b"]]) == text
        text = "classes must not repeat, got ['a', 'a']."
        assert refused(empirical_distribution, ["a"], classes=[["a", "a"]]) == text


# Equations (35) to (39): the steps that show that no other measure has the axioms.


def of_equal(number):
    """L(n): the entropy of n equally probable events."""
    return entropy(np.full(number, 1 / number))


@quick
@given(st.integers(1, 8), st.integers(1, 5))
def test_choosing_m_times_among_n_has_m_times_the_information(n, m):
    assert of_equal(n**m) == pytest.approx(m * of_equal(n), abs=1e-9)


@quick
@given(st.integers(1, 5000))
def test_more_equally_probable_events_have_more_information(n):
    assert of_equal(n) < of_equal(n + 1)


@quick
@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 40))
def test_the_ratio_of_two_informations_lies_between_the_powers_that_enclose_them(n, s, m):
    """s^k <= n^m < s^(k + 1) for one k, and so k / m <= L(n) / L(s) <= (k + 1) / m: L is a logarithm."""
    k = 0
    while s ** (k + 1) <= n**m:
        k += 1
    ratio = of_equal(n) / of_equal(s)
    assert k / m - 1e-9 <= ratio <= (k + 1) / m + 1e-9


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_the_entropy_of_rational_probabilities_is_that_of_all_events_less_that_within_groups(sizes):
    total = sum(sizes)
    shares = np.array(sizes) / total
    within = sum(share * of_equal(size) for share, size in zip(shares, sizes, strict=True))
    assert entropy(shares) == pytest.approx(of_equal(total) - within, abs=1e-9)
