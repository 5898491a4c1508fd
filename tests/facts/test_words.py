"""The words of every kind of fact, which no other test checks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lopsided.facts import KINDS, Fact, cautions, notes

OTHERS = "Use --recipe fine-tune or from-scratch to train an encoder."
WORDS = [
    (
        notes.quick_for_vectors(512),
        "Recipe: quick, because no recipe was named: a regression on vectors of 512 numbers, without an encoder. Use "
        "--recipe adapter or from-scratch to train layers on them.",
    ),
    (notes.corrected_labels(1, 1200), "Corrections change 1 label of 1,200 images."),
    (notes.vectors(1000, 512), "1,000 vectors of 512 numbers, standardised by the training rows."),
    (
        notes.quick_by_size(4000),
        "Recipe: quick, because no recipe was named and there are 4,000 images, of which thorough would compute four "
        f"copies each, mirrored and turned: a pretrained encoder that is not trained. {OTHERS}",
    ),
    (
        notes.quick_by_rarest(1),
        "Recipe: quick, because no recipe was named and the rarest class has 1 image: a pretrained encoder that is not "
        f"trained. With so few, test-time augmentation is no reliable gain. {OTHERS}",
    ),
    (
        notes.quick_by_side(28),
        "Recipe: quick, because no recipe was named and the images are small (28 pixels): a pretrained encoder that is "
        f"not trained. Of such images, test-time augmentation is no reliable gain. {OTHERS}",
    ),
    (
        notes.thorough_by_size(40),
        "Recipe: thorough, because no recipe was named: 40 images, each also mirrored and turned, through a pretrained "
        f"encoder. Use --recipe quick for the images alone. {OTHERS}",
    ),
    (
        notes.expected_time(130.0, 61.2, 6),
        "This will take about 2 min: 61 s for features, and 6 trainings with evaluation.",
    ),
    (
        notes.expected_time(4.0, 0.0, 1),
        "This will take about 4 s: the features are cached, and 1 training with evaluation.",
    ),
    (notes.time_left(34.2), "About 34 s left, by the time of the last training."),
    (
        notes.alike_images(3, "near.csv"),
        "3 pairs of images are almost the same: near.csv lists them. If they show the same thing, give them one group "
        "(--group), so that no model is tested on what it saw.",
    ),
    (
        notes.table_columns(
            [{"name": "age", "categories": None, "missing": 3}, {"name": "sex", "categories": 2, "missing": 0}], 50
        ),
        "Beside each image, the classifier gets age (numbers, missing for 3 of 50 training images), sex (2 "
        "categories).",
    ),
    (
        cautions.telling_columns({"site": 0.9712, "ward": 1.0}),
        "Columns give the label away, by the balanced accuracy of each alone: site (0.971) and ward (1). Is this known "
        "before the label, for every image that the model will see? If not, leave it out.",
    ),
    (
        cautions.twelve_bits(3, 5),
        "3 of 5 images have 16 bits, but no value above 4,095. They are read as 12-bit images, in which 4,095 is "
        "white. If other images of the same camera are brighter, convert all to 8 bits alike.",
    ),
    (
        cautions.first_pages(2, 5),
        "2 of 5 images are TIFFs of several pages. Only the first page of each is used. If the others matter, save "
        "each page as an image.",
    ),
    (
        notes.few_by_counts(0),
        "Recipe: few, because no recipe was named and there is one class only: the distance from the frequent class, "
        "which needs no rare images.",
    ),
    (
        notes.few_by_counts(7),
        "Recipe: few, because no recipe was named and only 7 images are of the rarer class: the distance from the "
        "frequent class, joined with regressions on features.",
    ),
    (notes.one_class("good"), "All images are of one class, good. Other images will be called unusual."),
    (
        notes.folds_for_alarms(5),
        "5 folds, because false alarms of a threshold must be counted on images that were not trained on.",
    ),
    (
        notes.distance("good", 0, 1.0),
        "There is no image of another class than good: the score is the distance from good alone.",
    ),
    (
        notes.distance("good", 1, 1.5, 1.0),
        "The score joins a regression on 1 image of another class with the distance from good: one standard deviation "
        "farther away adds 1.5 to the log odds.",
    ),
    (
        notes.distance("good", 3, 0.84, 0.5),
        "The score joins regressions on 3 images of other classes with the distance from good: one standard deviation "
        "farther away adds 0.84 to the log odds.",
    ),
    (
        notes.distance("good", 30, 0.0, 0.0),
        "The score is that of regressions on 30 images of other classes. These are about as far from good as its own "
        "images, so the distance does not count.",
    ),
    (
        notes.aligned(0.468, True),
        "The position explains 47% of what varies in the images of the frequent class: they are aligned, so each "
        "position is also compared by itself.",
    ),
    (
        notes.aligned(0.22, False),
        "The position explains 22% of what varies in the images of the frequent class: they are not aligned, so "
        "only wholes are compared.",
    ),
    (
        cautions.unmeasured_classes(["fox"]),
        "fox has one image, which cannot be used for training and for testing at once. So recall, precision and AUROC "
        "of it cannot be given, and means over classes leave it out. The model can predict it.",
    ),
    (
        cautions.unmeasured_classes(["fox", "owl"]),
        "fox, owl have one image each, which cannot be used for training and for testing at once. So recall, precision "
        "and AUROC of them cannot be given, and means over classes leave them out. The model can predict them.",
    ),
    (notes.recipe_by_field("fine-tune", "fine_tune.steps"), "Recipe: fine-tune, because fine_tune.steps is set."),
    (
        notes.from_scratch_by_field("augment.crop"),
        "Recipe: from-scratch, because augment.crop is set, which has an effect only if an encoder is trained.",
    ),
    (
        notes.from_scratch_by_field("encoder.name"),
        "Recipe: from-scratch, because the encoder has no pretrained weights (weights).",
    ),
    (
        notes.quick_by_encoder(),
        "Recipe: quick, because the fields of the encoder are given: a pretrained encoder that is not trained. Use "
        "--recipe from-scratch to train an encoder.",
    ),
    (notes.chosen_by_comparison("ce", ["ce is best.", "Take ce."]), "ce is best. Take ce."),
    (
        notes.folds_by_default(5, "df", 12, 0.2, 60.0),
        "5 folds, because 'df' has only 12 images: so all of them are tested, not only 20%. This takes about 60 s "
        "longer than one split, which --folds 1 gives.",
    ),
    (
        notes.split_by_default("df", 12, 1200.0),
        "One split, although 'df' has only 12 images, because folds would take about 20 min longer. Use --folds 5 for "
        "them.",
    ),
    (
        notes.split("stratified", auto=True),
        "The images are split at random within each class (stratified); the default, because the data have neither "
        "splits nor groups.",
    ),
    (
        notes.split("group", auto=True),
        "The images are split by group: all images of a group are in one split; the default, because the data have "
        "groups.",
    ),
    (
        notes.split("given", auto=False, scenario=True),
        "The images are split as the data define it (given); as requested. The scenario draws training images; "
        "validation and test images of the data stay as they are.",
    ),
    (
        notes.fold_of("random", auto=False, fold=2, folds=4, repeat=2),
        "The test images are fold 2 of 4 in repeat 2. The images are split at random, without regard to classes or "
        "groups; as requested.",
    ),
    (
        notes.folds(39, 3, "stratified", 2),
        "The 39 images are in 3 folds with the class shares of all. Each fold tests a model of the others, 2 times.",
    ),
    (
        notes.mixed_groups(1, "p1"),
        "One group holds images of several classes, for example p1. Check its labels.",
    ),
    (notes.left_out(1), "data.include and data.exclude left out one image."),
    (notes.unused_validation(6), "6 images of the given val split are ignored because data.val is 0."),
    (
        notes.unlabelled_rows("marks.csv", {"skip": 1, "no": 2}),
        "marks.csv holds rows without a label, which are left out: 1 skip and 2 no.",
    ),
    (
        notes.repeated_labels(2),
        "2 of the further labels only repeat labels that the images already have; they are left out.",
    ),
    (
        notes.held_out_labels(2),
        "2 of the further labels are of held-out images or their groups; they are left out.",
    ),
    (
        notes.further_without_group(1, 2, "lesion"),
        "1 of 2 further images have no group, so each counts as a group of its own. If one belongs to a group that is "
        "tested, the metrics are too high. Fill the column lesion of the table.",
    ),
    (
        notes.further_labels({"cat": 1, "dog": 0}),
        "Further labels: 1 cat. These images are for training only and are never tested.",
    ),
    (
        notes.resized(64),
        "The images have different sizes and are resized to 64 x 64 pixels. Set another size with image_size.",
    ),
    (
        notes.images_read(10, [3, 8, 8], 1.2, "memory", "auto", None),
        '10 images of 3 x 8 x 8 (1.2 MB decoded) are kept in memory: cache is "auto" and an unknown amount of memory '
        "is free.",
    ),
    (
        notes.images_read(10, [3, 8, 8], 1.2, "decoded", "none", 2000.0),
        '10 images of 3 x 8 x 8 (1.2 MB decoded) are decoded again in every epoch: cache is "none" and 2,000 MB of '
        "memory is free.",
    ),
    (
        notes.images_read(10, [3, 8, 8], 1.2, "once", "auto", None),
        "10 images of 3 x 8 x 8 (1.2 MB decoded) go through the encoder once, unless their features are cached.",
    ),
    (
        notes.own_normalisation(2),
        "Each encoder normalises images by the mean and the deviation of its own weights.",
    ),
    (
        notes.normalisation((0.5, 0.25), (0.2, 0.2)),
        "Pixels in [0, 1] are normalised by mean 0.5 0.25 and deviation 0.2 0.2.",
    ),
    (
        notes.fitted_normalisation((0.5,), (0.2,)),
        "Pixels in [0, 1] are normalised by mean 0.5 and deviation 0.2. These are those of the training images.",
    ),
    (notes.continued("encoder", 3), "The run continues after epoch 3 of stage encoder."),
    (
        notes.changed_machine("threads", "1", "2"),
        "The run started with threads = 1 and continues with threads = 2, so the last digits may differ.",
    ),
    (
        notes.not_repeatable("cuda"),
        "On cuda, two runs of the same recipe may differ in the last digits. On a CPU they do not.",
    ),
    (notes.ranks(2, 1024), "2 ranks share each batch of 1,024 images."),
    (notes.batch_norm("sync"), 'Batch norm computes its statistics over all ranks: batch_norm is "sync".'),
    (
        notes.batch_norm("rank"),
        'Batch norm computes its statistics over each rank\'s own images: batch_norm is "rank", and the running '
        "statistics are averaged over the ranks after each epoch.",
    ),
    (notes.precision("bfloat16"), "The encoder is trained in bfloat16; its weights and losses are float32."),
    (
        notes.chunks(32, "share"),
        "A batch goes through the encoder in chunks of 32 images; batch norm treats each rank's share of a chunk as a "
        "batch.",
    ),
    (notes.chunks(32, ""), "A batch goes through the encoder in chunks of 32 images."),
    (
        notes.queue(64, balanced=False),
        "A batch is also contrasted with up to 64 features of past batches, the most recent ones.",
    ),
    (
        notes.reweighting(0.5, 0.9999),
        "After 50% of the epochs, the loss weights classes by their effective number (beta = 0.9999).",
    ),
    (notes.resampling(0.5), "After 50% of the epochs, batches are drawn with classes equally."),
    (notes.mixing(0.4, 1.0), "The images of a batch are mixed by mixup (alpha = 0.4) or CutMix (alpha = 1)."),
    (notes.sharpness(0.05), "SAM with rho = 0.05 computes two gradients in every step, which takes twice as long."),
    (notes.moving_average(0.9), "The model is a moving average of the weights (decay 0.9)."),
    (
        notes.weight_average(0.75),
        "The model is the mean of the weights at the end of each epoch after 75% of the epochs (SWA).",
    ),
    (
        notes.kept_epoch("encoder", 3, 5, "smooth_log_loss", 0.25),
        "Stage encoder keeps epoch 3 of 5, validation smooth log loss 0.2500.",
    ),
    (
        notes.minutes(2.0, 50, 100.0),
        "fine_tune.minutes = 2 gives 50 steps of 2 s on this machine. The number is now fixed for this run. Set "
        "fine_tune.steps = 50 to repeat the run elsewhere.",
    ),
    (
        notes.minutes(2.0, 1, -1.0),
        "The preparation took longer than fine_tune.minutes = 2, so the encoder is trained for 1 step. Set more "
        "minutes.",
    ),
    (notes.fixed_steps(9), "The run keeps the 9 steps that were fixed when it started."),
    (
        notes.trained_blocks("vit", 2, 10, 1000, 4, 39, 12.0),
        "10 of the 1,000 weights of vit are trained: fine_tune.blocks is 2. The activations of 4 views of 39 images "
        "take 12 MB in memory.",
    ),
    (
        notes.tau(0.7, "log_loss", 21),
        "The weights of the classifier are divided by their length to the power tau = 0.7, the best of 21 values by "
        "validation log loss, without bias.",
    ),
    (
        notes.tau(1.0, None, 0),
        "The weights of the classifier are divided by their length to the power tau = 1 of the recipe, without bias.",
    ),
    (
        notes.blend(0.25),
        "The model averages the logits of two regressions: on the features of the pretrained encoder (weight 0.25) "
        "and of the trained encoder (weight 0.75).",
    ),
    (
        notes.heads(5, 3, 0.5),
        "5 heads were trained, each without one of 3 inner folds, whose images calibrate the logits. Their average "
        "has the weight 0.5.",
    ),
    (
        notes.heads(1, 0, 0.0),
        "One head was trained on all training images, because a class has too few images for inner folds.",
    ),
    (
        notes.features("onnxruntime", "vit", ["identity", "hflip"], auto=False, cache="/c"),
        "onnxruntime computes the features of vit, averaged over the views identity, hflip of each image. Features "
        "are cached in /c.",
    ),
    (
        notes.features("torch", "vit", [], auto=True, cache=None),
        "torch computes the features of vit. Features are not cached.",
    ),
    (
        notes.chosen_views("flips", {"flips": 0.31, "flip": 0.3, "none": 0.3}),
        "The features are means over the views flips. Log loss of inner folds: flips 0.31, flip 0.3, none 0.3.",
    ),
    (
        notes.chosen_views("none", {"flips": 0.69, "none": 0.1}),
        "The features are those of the image alone: the classes seem to depend on which way round the images are. "
        "Log loss of inner folds: flips 0.69, none 0.1.",
    ),
    (
        notes.unchosen_views("flips"),
        "A class has too few images for inner folds to choose the views of an image: the features are means over "
        "flips. If a view can look like another class, name the views to use (tta).",
    ),
    (
        notes.other_views(2, 5),
        "2 of 5 folds chose other views than the model, so the metrics are partly those of other views.",
    ),
    (
        notes.hub_weights("resnet18", "timm/resnet18.a1_in1k", 46.8, "apache-2.0"),
        "The encoder resnet18 has the weights timm/resnet18.a1_in1k of the Hugging Face hub (47 MB). Licence: "
        "apache-2.0.",
    ),
    (
        notes.chosen_strength(0.1, 9, 5),
        "The regression has the strength C = 0.1, the best of 9 values on 5 inner folds.",
    ),
    (notes.given_strength(0.1), "The regression has the strength C = 0.1 of the recipe."),
    (
        notes.usual_strength(1.0),
        "A class has too few images for inner folds: the regression has the strength C = 1.",
    ),
    (notes.decision("plain", "The most probable class."), "The most probable class."),
    (
        notes.calibrated(9, "validation", 1.25, (0.5, -0.5), ["df"]),
        "The probabilities are calibrated on 9 validation images: temperature 1.25, bias +0.50, -0.50. There are no "
        "validation images of df.",
    ),
    (
        notes.calibrated(39, "out-of-fold", 1.0, None),
        "The probabilities are calibrated on 39 out-of-fold images: temperature 1.",
    ),
    (
        notes.not_calibrated(),
        "The probabilities are not calibrated, because there are no validation images.",
    ),
    (
        notes.model(1, 1, 2_500_000, 10.0),
        "The model is trained on all images (2.5 million parameters, 10.0 MB). The models of the folds only test it.",
    ),
    (
        notes.model(5, 5, 2_500_000, 10.0),
        "The model is the ensemble of the 5 models of the folds (2.5 million parameters, 10.0 MB): it averages their "
        "logits. An image costs 5 times as much as with one of them. Use final=refit for one model of all images.",
    ),
    (
        notes.model(5, 1, 2_500_000, 10.0),
        "The model is the ensemble of the 5 models of the folds (2.5 million parameters, 10.0 MB): it averages their "
        "logits. An image costs as much as with one of them, because they share the encoder. Use final=refit for "
        "one model of all images.",
    ),
    (
        notes.quick_compared(2.0, "folds"),
        "For comparison, the recipe quick was fitted on the same folds (2.0 s): the report and -v show it.",
    ),
    (
        notes.quick_not_compared("no weights."),
        "The recipe quick could not be used for comparison: no weights.",
    ),
    (
        notes.wrong_labels(11.4, 0.3, 24.6, 448, 19, "labels.csv"),
        "About 11 of 448 labels may be wrong (95 % interval 0 to 25), by models that did not see the image. "
        "labels.csv marks 19 suspects.",
    ),
    (
        notes.near_duplicates(1, "pairs.csv"),
        "1 pair of images is almost the same but with different labels: pairs.csv lists them.",
    ),
    (
        notes.near_duplicates_not_searched(20_000),
        "Near-duplicates were not searched: there are more than 20,000 images.",
    ),
    (notes.tracked(["mlflow", "wandb"]), "Tracked by mlflow, wandb."),
    (
        notes.labelled_left_out(1, like=True),
        "One image is byte-identical to a labelled image of the run or of --like and left out.",
    ),
    (
        notes.typicality(1228, guessed=False),
        "Images unlike the training images are recognised by comparison with 1,228 of them.",
    ),
    (
        notes.typicality(42, guessed=True),
        "Images unlike the training images are recognised by comparison with 42 of them. With so few, the share of "
        "false alarms is an estimate.",
    ),
    (
        notes.typicality(200, guessed=True, groups=20),
        "Images unlike the training images are recognised by comparison with 200 of them, which are 20 groups. With so "
        "few, the share of false alarms is an estimate.",
    ),
    (
        notes.no_typicality("there are no validation images"),
        "The model cannot recognise images unlike the training images: there are no validation images.",
    ),
    (
        notes.unfamiliar_images(31, 500, 0.01),
        "31 of 500 images are unlike the training images. About 5.0 would be expected of 500 images like them. A new "
        "kind of object on the same camera may not be noticed.",
    ),
    (
        notes.unfamiliar_images(1, 1, 0.01),
        "The image is unlike the training images. A new kind of object on the same camera may not be noticed.",
    ),
    (
        notes.unfamiliar_images(0, 1, 0.01),
        "The image is like the training images. A new kind of object on the same camera may not be noticed.",
    ),
    (
        notes.unfamiliar_images(1, 60, 0.01, known=20, unit="groups"),
        "One image is unlike the training images. About 0.6 would be expected of 60 images like them. With 20 "
        "known groups, this is an estimate. A new kind of object on the same camera may not be noticed.",
    ),
    (
        notes.unfamiliar_images(0, 60, 0.01, known=20),
        "None of 60 images is unlike the training images. About 0.6 would be expected of 60 images like them. With 20 "
        "known images, this is an estimate. A new kind of object on the same camera may not be noticed.",
    ),
    (
        notes.level_not_reached(0.01, 0.5, 1),
        "With 1 known image, the lowest level is 0.5 instead of 0.01: an image is marked if it is farther away than "
        "every known image.",
    ),
    (
        notes.level_not_reached(0.001, 1 / 121, 120),
        "With 120 known images, the lowest level is 0.00826 instead of 0.001: an image is marked if it is farther away "
        "than every known image.",
    ),
    (
        notes.no_bank(),
        "The model has no bank of known images, so unfamiliar images are not marked. Train it again to get one.",
    ),
    (
        notes.unfamiliar_left_out(2),
        "2 images are unlike the training images and left out. Keep them with --unfamiliar mark.",
    ),
    (
        cautions.cheap_cues("df", {"brightness": 0.812, "all simple cues together": 0.86}),
        "Brightness alone separates df from the other images with an AUROC of 0.81, all simple cues together "
        "with 0.86: were they photographed differently? Then the model may know the camera instead of the object.",
    ),
    (
        cautions.odd_part("df", (30, 25), (115, 1113), ("red", "corners"), ("sharpness",), (), ["a.jpg", "b.jpg"]),
        "55 images look as if another camera took them (a redder background, lighter corners, a less sharp background)"
        ": 30 of 115 images of df (26%) and 25 of 1,113 others (2%). The model may know the camera or the place "
        "instead of the object. Look at them: a.jpg, b.jpg. If a column of a table names the camera, use --source.",
    ),
    (
        notes.left_out_sources(
            "camera",
            ["mel", "df"],
            [
                {"source": "a", "counts": [20, 3], "auroc": 0.912, "uwa": 0.8},
                {"source": "b", "counts": [9, 0], "auroc": None, "uwa": None},
            ],
            0.957,
            0.9,
        ),
        "Trained without a source (camera) and tested on it: a AUROC 0.912, balanced accuracy 0.800 (20 mel, 3 df); "
        "b no AUROC, because a class is missing (9 mel, 0 df). By folds: AUROC 0.957, balanced accuracy 0.900.",
    ),
    (
        cautions.worse_source("a", 0.771, 0.957),
        "On images of the source a, a model that was trained without it has an AUROC of 0.771 instead of 0.957 by "
        "folds: the metrics hold for images of the known sources, not for those of a new one.",
    ),
    (
        cautions.drift(31, 500, 0.01, 0.0001),
        "These images differ from the training images (p < 0.001): they are less typical, and 6.2% are "
        "unfamiliar instead of 1.0%. The metrics of the run may not hold for them.",
    ),
    (
        cautions.drift(31, 500, 0.01, 0.005, ungrouped=True),
        "These images differ from the training images (p = 0.005): they are less typical, and 6.2% are "
        "unfamiliar instead of 1.0%. The metrics of the run may not hold for them. If they have groups, as in "
        "training, name them with --group or --group-from.",
    ),
    (notes.known_images(3, 9), "Compared with 3 known images of the class and 9 of other classes."),
    (notes.earlier_scores(7), "Continued: the scores of 7 images are those of an earlier call."),
    (notes.small_pool(7, 500), "The pool has only 7 images to list, fewer than --top 500."),
    (
        cautions.no_test_split(),
        "There is no test split: the run cannot estimate how well the model does on new images.",
    ),
    (
        cautions.few_test_images(dict.fromkeys("abcdefg", 6), 30),
        "The test split holds fewer than 30 images of a (6), b (6), c (6), d (6), e (6) and 2 more classes: check how "
        "wide the intervals are.",
    ),
    (
        cautions.few_images({"few": 6}, 30),
        "There are fewer than 30 images of few (6): check how wide the intervals are.",
    ),
    (
        cautions.no_validation_split(),
        "There is no validation split: the run keeps the weights of the last epoch, not of the best one.",
    ),
    (
        cautions.few_validation_images({"few": 9}, 10),
        "The validation split holds fewer than 10 images of few (9): the choice of the epoch is noisy.",
    ),
    (
        cautions.shared_groups(2, "p1", "split"),
        "2 groups are in more than one split, for example p1: the metrics will be too high. Split by group ("
        "split=group).",
    ),
    (
        cautions.shared_groups(1, "p1", "fold"),
        "One group is in more than one fold, for example p1: the metrics will be too high. Use folds by group ("
        "split=group).",
    ),
    (
        cautions.shared_images(1, ["a.png", "train", "b.png", "test"], "split"),
        "One image is byte-identical to an image in another split, for example b.png in test and a.png in train: the "
        "metrics will be too high.",
    ),
    (
        cautions.similar_names([["Brake", "Break"]], {"Brake": 1, "Break": 70}),
        "Classes with similar names: Brake (1 image) and Break (70). If they are the same class, rename one of them.",
    ),
    (
        cautions.repeating_column("lesion", 345, 448),
        "The column lesion repeats: 345 values in 448 rows. If several images show one lesion, the metrics are too "
        "high, because such images are in training and test: use --group lesion.",
    ),
    (
        cautions.same_patients(3, 8),
        "3 patients have several images, 8 together, and the images of a patient may be in two splits: the metrics may "
        "be too high. Use --group PatientID.",
    ),
    (
        cautions.same_stems(2, ["a/1.jpg", "a/1.png"], ".png"),
        "2 pairs of images differ only in the suffix, for example a/1.jpg and a/1.png: both are used as images. "
        "If one of them is a mask, leave it out, for example with exclude='*.png'.",
    ),
    (
        cautions.large_images(4000, 3000),
        "The images have 4,000 x 3,000 pixels and are not resized, so training is slow and needs much memory. Set a "
        "size, for example image_size=224.",
    ),
    (cautions.not_cached("the disk is full."), "Features are not cached: the disk is full."),
    (
        cautions.large_queue(101, 100),
        "The queue holds up to 101 features, but the training images have only 100: older features of an image become "
        "positives of the same image. Use a smaller queue (encoder_training.queue).",
    ),
    (
        cautions.few_positives("few", 1.62, learns=False),
        "A batch holds 1.6 images of few on average: anchors without a positive do not learn. Use larger batches, "
        "encoder_training.views = 2, a queue (encoder_training.queue), or "
        'encoder_training.sampler = "balanced".',
    ),
    (
        cautions.falling_loss("encoder", 2.0, 1.25, "epochs"),
        "The training loss of stage encoder still fell steeply at its last epoch (2 to 1.25), so the model may not be "
        "trained enough. Train for more epochs (epochs).",
    ),
    (
        cautions.directed_classes(0.1, 0.69, "tta=auto"),
        "The classes seem to depend on which way round the images are, which an average over views loses: the log "
        "loss in inner folds is 0.10 without views and 0.69 with them. Use tta=auto.",
    ),
    (
        cautions.below_baseline("validation", "small-images", 0.4, 0.9, -0.6, -0.4, 0.95, "Try another loss."),
        "On the validation images, the balanced accuracy of the model (0.400) is below that of a simple baseline, a "
        "linear classifier on images of 16 x 16 pixels (0.900). The 95 % interval of the difference is [-0.600, "
        "-0.400]. Try another loss.",
    ),
    (
        cautions.below_baseline("test", "quick", 0.4, 0.9, -0.6, -0.4, 0.95, "Try another loss."),
        "On the test images, the balanced accuracy of the model (0.400) is below that of the recipe quick, which "
        "takes seconds (0.900). The 95 % interval of the difference is [-0.600, -0.400]. Do not tune the model on test "
        "images: hold out validation images (val=0.15) to compare settings.",
    ),
    (
        cautions.tracker_failed("mlflow", "OSError: full"),
        "The tracker mlflow failed and is left out; the run continues without it (OSError: full).",
    ),
    (
        cautions.trackers_cannot_resume("full"),
        "The trackers will not recognise the run when it is resumed (full).",
    ),
    (cautions.results_not_sent("full"), "The results could not be sent to the trackers (full)."),
    (
        cautions.cells_not_sent(2, ["mlflow"]),
        "2 finished cells are not sent to mlflow: a tracker receives the cells that are trained from now on.",
    ),
    (
        cautions.unknown_images("The data are gone."),
        "The data are gone. Images that the run was trained on are not left out.",
    ),
]


@pytest.mark.parametrize(("fact", "words"), WORDS, ids=[fact.kind for fact, _ in WORDS])
def test_a_fact_has_these_words_and_stays_the_same_through_a_file(fact: Fact, words: str) -> None:
    assert str(fact) == words
    content = json.loads(json.dumps(fact.to_dict()))
    assert content["text"] == words
    assert Fact.from_dict(content) == fact


def test_every_kind_is_in_the_table_above() -> None:
    assert set(KINDS) == {fact.kind for fact, _ in WORDS}


def test_python_without_docstrings_has_the_words() -> None:
    code = "from lopsided.facts import cautions; print(cautions.no_test_split())"
    said = subprocess.run([sys.executable, "-OO", "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.strip() == str(cautions.no_test_split())
    assert said.startswith("There is no test split")
