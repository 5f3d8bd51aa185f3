//! The options of a convolution.

use serde::{Deserialize, Serialize};

/// The options of a convolution: of each spatial axis, one to three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Convolution {
    pub(crate) stride: [u32; 3],
    pub(crate) padding: [u32; 3],
    pub(crate) dilation: [u32; 3],
    groups: u32,
}

/// The padding of an axis: one number, or those before and after it from Burn 0.22 on. The one before tells where a value is.
#[doc(hidden)]
pub trait Padding: Copy {
    fn before(self) -> usize;
}

impl Padding for usize {
    fn before(self) -> usize {
        self
    }
}

impl Padding for (usize, usize) {
    fn before(self) -> usize {
        self.0
    }
}

impl Convolution {
    /// These options.
    #[doc(hidden)]
    pub fn of<const N: usize>(
        stride: [usize; N],
        padding: [impl Padding; N],
        dilation: [usize; N],
        groups: usize,
    ) -> Self {
        let axes = |of: [usize; N], rest| {
            std::array::from_fn(|axis| of.get(axis).map_or(rest, |value| *value as u32))
        };
        Self {
            stride: axes(stride, 1),
            padding: axes(padding.map(Padding::before), 0),
            dilation: axes(dilation, 1),
            groups: groups as u32,
        }
    }

    /// The number of groups.
    pub fn groups(&self) -> usize {
        self.groups as usize
    }

    /// The options of so many axes that are not the usual ones. The groups are a kind of call.
    pub(crate) fn unusual(&self, axes: usize) -> impl Iterator<Item = String> {
        let options = [
            ("stride", self.stride, 1),
            ("padding", self.padding, 0),
            ("dilation", self.dilation, 1),
        ];
        let unusual = options
            .into_iter()
            .filter(|(_, of, usual)| *of != [*usual; 3]);
        unusual.map(move |(name, of, _)| format!("{name} {:?}", &of[..axes]))
    }

    /// Whether any stride is larger than 1.
    pub fn strides(&self) -> bool {
        self.stride.iter().any(|stride| *stride > 1)
    }
}

/// The options of a convolution of any version of Burn.
#[doc(hidden)]
#[macro_export]
macro_rules! convolution {
    ($options:ident) => {
        $crate::policy::Convolution::of(
            $options.stride,
            $options.padding,
            $options.dilation,
            $options.groups,
        )
    };
}
