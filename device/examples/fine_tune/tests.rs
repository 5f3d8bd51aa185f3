//! The shipped weights load, another file does not, and a short training in f16 learns.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs, process};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_amp_device::{GradScaler, Precision, flex};

use crate::corpus::Corpus;
use crate::data::BATCH;
use crate::model::Classifier;
use crate::train::{Plan, accuracy, fine_tune};
use crate::weights::{load, shipped};

/// Random numbers and the scaler are the process's: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn classifier(corpus: &Corpus, device: &Device) -> Classifier {
    device.seed(42);
    Classifier::new(corpus.vocabulary.len(), device)
}

/// The parameters in FP32, and those of them whose values are all in f16's.
#[derive(Default)]
struct Rounded {
    parameters: usize,
    rounded: usize,
}

impl ModuleVisitor for Rounded {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let weight = param.val();
        assert_eq!(weight.dtype(), DType::F32);
        let data = weight.into_data();
        let rounded = data.clone().convert_dtype(DType::F16);
        self.parameters += 1;
        self.rounded += usize::from(rounded.convert_dtype(DType::F32) == data);
    }
}

#[test]
fn the_shipped_file_has_the_whole_encoder_and_gives_fp32_parameters() {
    let _alone = alone();
    let corpus = Corpus::load(0, 42);
    let mut model = classifier(&corpus, &flex(Precision::F16).unwrap());
    let loaded = load(&mut model, &shipped(), Some("output.")).unwrap();
    let mut missing: Vec<_> = loaded.missing.iter().map(|(name, _)| &name[..]).collect();
    missing.sort_unstable();
    assert_eq!(missing, ["output.bias", "output.weight"]);
    // That of the guesser's output.
    assert_eq!(loaded.unused, ["bias"]);
    assert!(loaded.errors.is_empty(), "{:?}", loaded.errors);

    let mut found = Rounded::default();
    model.visit(&mut found);
    assert_eq!(loaded.applied.len() + missing.len(), found.parameters);
    assert_eq!(loaded.applied.len(), found.rounded);
}

#[test]
fn a_file_of_something_else_is_an_error_that_names_it() {
    let _alone = alone();
    let corpus = Corpus::load(0, 42);
    let device = flex(Precision::F16).unwrap();
    let error = |mut model: Classifier, file: &Path, new| {
        let error = load(&mut model, file, new).unwrap_err().to_string();
        assert!(error.contains(&file.display().to_string()), "{error}");
        error
    };
    let new = Some("output.");
    let text = shipped().with_extension("md");
    let unread = error(classifier(&corpus, &device), &text, new);
    assert!(unread.starts_with("cannot read "), "{unread}");
    let absent = error(
        classifier(&corpus, &device),
        Path::new("absent.safetensors"),
        new,
    );
    assert!(absent.starts_with("cannot read "), "{absent}");
    // Only a fine-tuned file has an output.
    let part = error(classifier(&corpus, &device), &shipped(), None);
    assert!(part.contains(" has no output."), "{part}");
    let other = error(Classifier::new(100, &device), &shipped(), new);
    assert!(other.contains("encoder.words.weight"), "{other}");
}

/// Of short verses: the tests are not optimized.
#[test]
fn a_few_steps_in_f16_teach_what_the_verses_say() {
    let _alone = alone();
    let mut corpus = Corpus::load(1227, 42);
    corpus.labelled.retain(|verse| verse.tokens.len() <= 12);
    let verses = &corpus.labelled[..BATCH + 1];
    let (train, valid) = verses.split_at(BATCH);
    let device = flex(Precision::F16).unwrap();
    let mut model = classifier(&corpus, &device.clone().autodiff());
    load(&mut model, &shipped(), Some("output.")).unwrap();
    let before = accuracy(&model.valid(), train, &device);

    let output = env::temp_dir().join(format!("burn-amp-fine-tune-{}", process::id()));
    let plan = Plan {
        steps: 6,
        learning_rate: 5e-3,
        seed: 42,
        output: output.clone(),
    };
    let model = fine_tune(model, train, valid, &plan).unwrap();
    fs::remove_dir_all(output).unwrap();
    let scaler = GradScaler::of(&device);
    assert_eq!(scaler.taken_steps() + scaler.skipped_steps(), 6);
    let after = accuracy(&model, train, &device);
    assert!(before < 0.7 && after > 0.9, "{before}, then {after}");
}
