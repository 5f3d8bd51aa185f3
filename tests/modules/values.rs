//! Inputs and parameters, the same on every backend.

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    }

    /// Uniform on [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    pub fn normal(&mut self) -> f32 {
        // Twelve uniform numbers have the variance of one normal number.
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    /// A normal number of bf16. Inputs are exact in both halves, so that differences come from the
    /// module, and no input falls on the other side of a kink.
    pub fn normal_in_bf16(&mut self) -> f32 {
        in_bf16(self.normal()).clamp(-3.96875, 3.96875)
    }

    pub fn probability_in_bf16(&mut self) -> f32 {
        in_bf16(0.0625 + 0.875 * self.uniform())
    }

    /// A parameter that keeps activations near one.
    pub fn parameter(&mut self, name: Option<&str>, shape: &[usize]) -> Vec<f32> {
        let elements: usize = shape.iter().product();
        let (mean, std) = match (name, shape.len()) {
            (Some("gamma"), _) => (1.0, 0.2),
            (Some("running_var"), _) => (2.0, 0.1),
            (Some("alpha"), _) => (0.25, 0.05),
            (_, 1) => (0.0, 0.2),
            (_, 2) => (0.0, (shape[0] as f32).sqrt().recip()),
            _ => (0.0, ((elements / shape[0]) as f32).sqrt().recip()),
        };
        (0..elements).map(|_| mean + std * self.normal()).collect()
    }

    /// Of either sign, not close to zero.
    pub fn weight(&mut self) -> f32 {
        let sign = if self.next().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        };
        sign * (0.5 + self.uniform())
    }
}

/// Rounds to bf16. No value that is drawn is so small that f16 would not hold it.
fn in_bf16(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + 0x8000) & 0xffff_0000)
}
