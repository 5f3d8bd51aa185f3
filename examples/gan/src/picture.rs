//! The picture: real digits on the left and generated ones on the right, a class a row, enlarged.

use image::imageops::{self, FilterType};
use image::{GrayImage, Luma};

use crate::data::{CLASSES, Digits, SIDE};
use crate::train::SAMPLES;

/// The side of an enlarged digit.
const ENLARGED: u32 = 7 * SIDE as u32;
const GAP: u32 = 3;
/// Between the real and the generated ones.
const MIDDLE: u32 = 6 * GAP;
const FRAME: Luma<u8> = Luma([214]);

pub fn samples(digits: &Digits, generated: &[f32]) -> GrayImage {
    let cell = ENLARGED + GAP;
    let half = SAMPLES as u32 * cell;
    let mut picture =
        GrayImage::from_pixel(2 * half + MIDDLE + GAP, CLASSES as u32 * cell + GAP, FRAME);
    let mut paste = |pixels: &[f32], left: u32, row: usize, column: usize| {
        let x = left + GAP + column as u32 * cell;
        let y = GAP + row as u32 * cell;
        imageops::replace(&mut picture, &enlarged(pixels), x.into(), y.into());
    };
    for class in 0..CLASSES {
        let real = digits
            .test
            .iter()
            .filter(|digit| usize::from(digit.label) == class);
        for (column, digit) in real.take(SAMPLES).enumerate() {
            paste(&digit.pixels, 0, class, column);
        }
    }
    for (i, pixels) in generated.chunks(SIDE * SIDE).enumerate() {
        paste(pixels, half + MIDDLE, i / SAMPLES, i % SAMPLES);
    }
    picture
}

/// Dark on light, as written on paper.
fn enlarged(pixels: &[f32]) -> GrayImage {
    let side = SIDE as u32;
    let small = GrayImage::from_fn(side, side, |x, y| {
        let ink = pixels[y as usize * SIDE + x as usize].clamp(0.0, 1.0);
        Luma([(255.0 * (1.0 - ink)).round() as u8])
    });
    imageops::resize(&small, ENLARGED, ENLARGED, FilterType::Triangle)
}
