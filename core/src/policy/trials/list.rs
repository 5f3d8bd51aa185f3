//! The operations that are tried, each with the operands of its trials.

/// The tried operations. Each row has the first version of Burn with the operation, its name, the
/// [`Kind`](super::Kind) of calls that the row is about, and the arguments of its trials; and, where its signature
/// changed, the version that changed it and the arguments from then on.
///
/// In an implementation of [`TrialDevice`](super::TrialDevice), `trials! { for Burn 0.21 }` expands to the
/// function `trials`. This is a macro because each version of Burn has its own `Backend`, and a trial calls a
/// method of `B`.
// A matrix of one row selects a different kernel than a matrix of many rows. A convolution like those of most layers
// decides for layers like these: with 64 channels and three taps in each dimension, or with one tap. A depthwise one has
// eight taps: with 15 and up to 16 channels, oneDNN 3.7 loops for ever in f16 on CPUs with AVX512-FP16.
#[doc(hidden)]
#[macro_export]
macro_rules! trials {
    (for $($of:tt)*) => {
        $crate::trials! { $($of)* |inputs|
            0.21 float_matmul
                (inputs.ones([1, N]), inputs.ones([N, 1]))
                (inputs.ones([1, N]), inputs.ones([N, 8]))
                (inputs.ones([8, N]), inputs.ones([N, 8]))
                (inputs.ones([2, 1, N]), inputs.ones([2, N, 8]));
            0.21 linear
                (inputs.ones([1, N]), inputs.ones([N, 8]), None)
                (inputs.ones([8, N]), inputs.ones([N, 8]), None);
            0.21 linear_x_backward
                (inputs.ones([8, N]), inputs.ones([1, N]))
                (inputs.ones([8, N]), inputs.ones([8, N]));
            0.21 linear_weight_backward
                (inputs.ones([N, 8]), inputs.ones([N, 8]))
                (inputs.ones([N, 1]), inputs.ones([N, 1]));
            0.21 conv1d
                (inputs.ones([1, 64, 64]), inputs.peak([64, 64, 3]), None, conv(1, 1))
                (inputs.ones([1, N, 64]), inputs.ones([16, N, 1]), None, conv(1, 1));
            0.21 conv1d few
                (inputs.ones([1, 1, 64]), inputs.peak([1, 1, 64]), None, conv(1, 1));
            0.21 conv1d grouped
                (inputs.ones([1, 128, 64]), inputs.peak([4, 64, 3]), None, conv(1, 2))
                (inputs.ones([1, 2, 64]), inputs.peak([2, 1, 8]), None, conv(1, 2));
            0.21 conv1d_x_backward
                (inputs.ones([1, 64, 66]), inputs.peak([64, 64, 3]), inputs.ones([1, 64, 64]), conv(1, 1))
                (inputs.ones([1, 16, 64]), inputs.ones([N, 16, 1]), inputs.ones([1, N, 64]), conv(1, 1));
            0.21 conv1d_x_backward few
                (inputs.ones([1, 1, 127]), inputs.peak([1, 1, 64]), inputs.ones([1, 1, 64]), conv(1, 1));
            0.21 conv1d_x_backward grouped
                (inputs.ones([1, 2, 71]), inputs.peak([2, 1, 8]), inputs.ones([1, 2, 64]), conv(1, 2));
            0.21 conv1d_x_backward strided
                (inputs.ones([1, 64, 129]), inputs.peak([64, 64, 3]), inputs.ones([1, 64, 64]), conv(2, 1));
            0.21 conv1d_weight_backward
                (inputs.ones([16, 16, 258]), inputs.ones([16, 16, 3]), inputs.ones([16, 16, 256]), conv(1, 1));
            0.21 conv1d_weight_backward small
                (inputs.ones([2, 16, 2050]), inputs.ones([16, 16, 3]), inputs.ones([2, 16, 2048]), conv(1, 1))
                (inputs.ones([2, 1, 2048]), inputs.ones([1, 1, 1]), inputs.ones([2, 1, 2048]), conv(1, 1));
            0.21 conv1d_weight_backward few
                (inputs.ones([16, 1, 256]), inputs.ones([1, 1, 1]), inputs.ones([16, 1, 256]), conv(1, 1));
            0.21 conv1d_weight_backward grouped
                (inputs.ones([2, 2, 2048]), inputs.ones([2, 1, 1]), inputs.ones([2, 2, 2048]), conv(1, 2));
            0.21 conv2d
                (inputs.ones([1, 64, 8, 8]), inputs.peak([64, 64, 3, 3]), None, conv(1, 1))
                (inputs.ones([1, N, 8, 8]), inputs.ones([16, N, 1, 1]), None, conv(1, 1));
            0.21 conv2d few
                (inputs.ones([1, 1, 8, 8]), inputs.peak([1, 1, 8, 8]), None, conv(1, 1));
            0.21 conv2d grouped
                (inputs.ones([1, 128, 8, 8]), inputs.peak([4, 64, 3, 3]), None, conv(1, 2))
                (inputs.ones([1, 2, 8, 8]), inputs.peak([2, 1, 8, 8]), None, conv(1, 2));
            0.21 conv2d_x_backward
                (inputs.ones([1, 64, 10, 10]), inputs.peak([64, 64, 3, 3]), inputs.ones([1, 64, 8, 8]), conv(1, 1))
                (inputs.ones([1, 16, 8, 8]), inputs.ones([N, 16, 1, 1]), inputs.ones([1, N, 8, 8]), conv(1, 1));
            0.21 conv2d_x_backward few
                (inputs.ones([1, 1, 15, 15]), inputs.peak([1, 1, 8, 8]), inputs.ones([1, 1, 8, 8]), conv(1, 1));
            0.21 conv2d_x_backward grouped
                (inputs.ones([1, 2, 15, 15]), inputs.peak([2, 1, 8, 8]), inputs.ones([1, 2, 8, 8]), conv(1, 2));
            0.21 conv2d_x_backward strided
                (inputs.ones([1, 64, 17, 17]), inputs.peak([64, 64, 3, 3]), inputs.ones([1, 64, 8, 8]), conv(2, 1));
            0.21 conv2d_weight_backward
                (inputs.ones([16, 16, 18, 18]), inputs.ones([16, 16, 3, 3]), inputs.ones([16, 16, 16, 16]), conv(1, 1));
            0.21 conv2d_weight_backward small
                (inputs.ones([4, 16, 34, 34]), inputs.ones([16, 16, 3, 3]), inputs.ones([4, 16, 32, 32]), conv(1, 1))
                (inputs.ones([4, 1, 32, 32]), inputs.ones([1, 1, 1, 1]), inputs.ones([4, 1, 32, 32]), conv(1, 1));
            0.21 conv2d_weight_backward few
                (inputs.ones([16, 1, 16, 16]), inputs.ones([1, 1, 1, 1]), inputs.ones([16, 1, 16, 16]), conv(1, 1));
            0.21 conv2d_weight_backward grouped
                (inputs.ones([4, 2, 32, 32]), inputs.ones([2, 1, 1, 1]), inputs.ones([4, 2, 32, 32]), conv(1, 2));
            0.21 conv3d
                (inputs.ones([1, 64, 4, 4, 4]), inputs.peak([64, 64, 3, 3, 3]), None, conv(1, 1))
                (inputs.ones([1, N, 4, 4, 4]), inputs.ones([16, N, 1, 1, 1]), None, conv(1, 1));
            0.21 conv3d few
                (inputs.ones([1, 1, 4, 4, 4]), inputs.peak([1, 1, 4, 4, 4]), None, conv(1, 1));
            0.21 conv3d grouped
                (inputs.ones([1, 128, 4, 4, 4]), inputs.peak([4, 64, 3, 3, 3]), None, conv(1, 2))
                (inputs.ones([1, 2, 4, 4, 4]), inputs.peak([2, 1, 4, 4, 4]), None, conv(1, 2));
            0.21 conv3d_x_backward
                (inputs.ones([1, 64, 6, 6, 6]), inputs.peak([64, 64, 3, 3, 3]), inputs.ones([1, 64, 4, 4, 4]), conv(1, 1))
                (inputs.ones([1, 16, 4, 4, 4]), inputs.ones([N, 16, 1, 1, 1]), inputs.ones([1, N, 4, 4, 4]), conv(1, 1));
            0.21 conv3d_x_backward few
                (inputs.ones([1, 1, 7, 7, 7]), inputs.peak([1, 1, 4, 4, 4]), inputs.ones([1, 1, 4, 4, 4]), conv(1, 1));
            0.21 conv3d_x_backward grouped
                (inputs.ones([1, 2, 7, 7, 7]), inputs.peak([2, 1, 4, 4, 4]), inputs.ones([1, 2, 4, 4, 4]), conv(1, 2));
            0.21 conv3d_x_backward strided
                (inputs.ones([1, 64, 9, 9, 9]), inputs.peak([64, 64, 3, 3, 3]), inputs.ones([1, 64, 4, 4, 4]), conv(2, 1));
            0.21 conv3d_weight_backward
                (inputs.ones([16, 16, 10, 10, 6]), inputs.ones([16, 16, 3, 3, 3]), inputs.ones([16, 16, 8, 8, 4]), conv(1, 1));
            0.21 conv3d_weight_backward small
                (inputs.ones([2, 16, 18, 18, 10]), inputs.ones([16, 16, 3, 3, 3]), inputs.ones([2, 16, 16, 16, 8]), conv(1, 1))
                (inputs.ones([2, 1, 16, 16, 8]), inputs.ones([1, 1, 1, 1, 1]), inputs.ones([2, 1, 16, 16, 8]), conv(1, 1));
            0.21 conv3d_weight_backward few
                (inputs.ones([16, 1, 8, 8, 4]), inputs.ones([1, 1, 1, 1, 1]), inputs.ones([16, 1, 8, 8, 4]), conv(1, 1));
            0.21 conv3d_weight_backward grouped
                (inputs.ones([2, 2, 16, 16, 8]), inputs.ones([2, 1, 1, 1, 1]), inputs.ones([2, 2, 16, 16, 8]), conv(1, 2));
            0.21 conv_transpose1d
                (inputs.ones([1, 64, 64]), inputs.peak([64, 64, 3]), None, transpose(1, 1))
                (inputs.ones([1, N, 64]), inputs.ones([N, 16, 1]), None, transpose(1, 1));
            0.21 conv_transpose1d few
                (inputs.ones([1, 1, 64]), inputs.peak([1, 1, 64]), None, transpose(1, 1));
            0.21 conv_transpose1d grouped
                (inputs.ones([1, 2, 64]), inputs.peak([2, 1, 8]), None, transpose(1, 2));
            0.21 conv_transpose1d strided
                (inputs.ones([1, 64, 64]), inputs.peak([64, 64, 3]), None, transpose(2, 1));
            0.21 conv_transpose1d_x_backward
                (inputs.peak([64, 64, 3]), inputs.ones([1, 64, 66]), transpose(1, 1))
                (inputs.ones([16, N, 1]), inputs.ones([1, N, 64]), transpose(1, 1));
            0.21 conv_transpose1d_x_backward few
                (inputs.peak([1, 1, 64]), inputs.ones([1, 1, 127]), transpose(1, 1));
            0.21 conv_transpose1d_x_backward grouped
                (inputs.peak([2, 1, 8]), inputs.ones([1, 2, 71]), transpose(1, 2));
            0.21 conv_transpose1d_weight_backward
                (inputs.ones([16, 16, 256]), inputs.ones([16, 16, 3]), inputs.ones([16, 16, 258]), transpose(1, 1));
            0.21 conv_transpose1d_weight_backward small
                (inputs.ones([2, 16, 2048]), inputs.ones([16, 16, 3]), inputs.ones([2, 16, 2050]), transpose(1, 1))
                (inputs.ones([2, 1, 2048]), inputs.ones([1, 1, 1]), inputs.ones([2, 1, 2048]), transpose(1, 1));
            0.21 conv_transpose1d_weight_backward few
                (inputs.ones([16, 1, 256]), inputs.ones([1, 1, 1]), inputs.ones([16, 1, 256]), transpose(1, 1));
            0.21 conv_transpose1d_weight_backward grouped
                (inputs.ones([2, 2, 2048]), inputs.ones([2, 1, 1]), inputs.ones([2, 2, 2048]), transpose(1, 2));
            0.21 conv_transpose2d
                (inputs.ones([1, 64, 8, 8]), inputs.peak([64, 64, 3, 3]), None, transpose(1, 1))
                (inputs.ones([1, N, 8, 8]), inputs.ones([N, 16, 1, 1]), None, transpose(1, 1));
            0.21 conv_transpose2d few
                (inputs.ones([1, 1, 8, 8]), inputs.peak([1, 1, 8, 8]), None, transpose(1, 1));
            0.21 conv_transpose2d grouped
                (inputs.ones([1, 2, 8, 8]), inputs.peak([2, 1, 8, 8]), None, transpose(1, 2));
            0.21 conv_transpose2d strided
                (inputs.ones([1, 64, 8, 8]), inputs.peak([64, 64, 3, 3]), None, transpose(2, 1));
            0.21 conv_transpose2d_x_backward
                (inputs.peak([64, 64, 3, 3]), inputs.ones([1, 64, 10, 10]), transpose(1, 1))
                (inputs.ones([16, N, 1, 1]), inputs.ones([1, N, 8, 8]), transpose(1, 1));
            0.21 conv_transpose2d_x_backward few
                (inputs.peak([1, 1, 8, 8]), inputs.ones([1, 1, 15, 15]), transpose(1, 1));
            0.21 conv_transpose2d_x_backward grouped
                (inputs.peak([2, 1, 8, 8]), inputs.ones([1, 2, 15, 15]), transpose(1, 2));
            0.21 conv_transpose2d_weight_backward
                (inputs.ones([16, 16, 16, 16]), inputs.ones([16, 16, 3, 3]), inputs.ones([16, 16, 18, 18]), transpose(1, 1));
            0.21 conv_transpose2d_weight_backward small
                (inputs.ones([4, 16, 32, 32]), inputs.ones([16, 16, 3, 3]), inputs.ones([4, 16, 34, 34]), transpose(1, 1))
                (inputs.ones([4, 1, 32, 32]), inputs.ones([1, 1, 1, 1]), inputs.ones([4, 1, 32, 32]), transpose(1, 1));
            0.21 conv_transpose2d_weight_backward few
                (inputs.ones([16, 1, 16, 16]), inputs.ones([1, 1, 1, 1]), inputs.ones([16, 1, 16, 16]), transpose(1, 1));
            0.21 conv_transpose2d_weight_backward grouped
                (inputs.ones([4, 2, 32, 32]), inputs.ones([2, 1, 1, 1]), inputs.ones([4, 2, 32, 32]), transpose(1, 2));
            0.21 conv_transpose3d
                (inputs.ones([1, 64, 4, 4, 4]), inputs.peak([64, 64, 3, 3, 3]), None, transpose(1, 1))
                (inputs.ones([1, N, 4, 4, 4]), inputs.ones([N, 16, 1, 1, 1]), None, transpose(1, 1));
            0.21 conv_transpose3d few
                (inputs.ones([1, 1, 4, 4, 4]), inputs.peak([1, 1, 4, 4, 4]), None, transpose(1, 1));
            0.21 conv_transpose3d grouped
                (inputs.ones([1, 2, 4, 4, 4]), inputs.peak([2, 1, 4, 4, 4]), None, transpose(1, 2));
            0.21 conv_transpose3d strided
                (inputs.ones([1, 64, 4, 4, 4]), inputs.peak([64, 64, 3, 3, 3]), None, transpose(2, 1));
            0.21 conv_transpose3d_x_backward
                (inputs.peak([64, 64, 3, 3, 3]), inputs.ones([1, 64, 6, 6, 6]), transpose(1, 1))
                (inputs.ones([16, N, 1, 1, 1]), inputs.ones([1, N, 4, 4, 4]), transpose(1, 1));
            0.21 conv_transpose3d_x_backward few
                (inputs.peak([1, 1, 4, 4, 4]), inputs.ones([1, 1, 7, 7, 7]), transpose(1, 1));
            0.21 conv_transpose3d_x_backward grouped
                (inputs.peak([2, 1, 4, 4, 4]), inputs.ones([1, 2, 7, 7, 7]), transpose(1, 2));
            0.21 conv_transpose3d_weight_backward
                (inputs.ones([16, 16, 8, 8, 4]), inputs.ones([16, 16, 3, 3, 3]), inputs.ones([16, 16, 10, 10, 6]), transpose(1, 1));
            0.21 conv_transpose3d_weight_backward small
                (inputs.ones([2, 16, 16, 16, 8]), inputs.ones([16, 16, 3, 3, 3]), inputs.ones([2, 16, 18, 18, 10]), transpose(1, 1))
                (inputs.ones([2, 1, 16, 16, 8]), inputs.ones([1, 1, 1, 1, 1]), inputs.ones([2, 1, 16, 16, 8]), transpose(1, 1));
            0.21 conv_transpose3d_weight_backward few
                (inputs.ones([16, 1, 8, 8, 4]), inputs.ones([1, 1, 1, 1, 1]), inputs.ones([16, 1, 8, 8, 4]), transpose(1, 1));
            0.21 conv_transpose3d_weight_backward grouped
                (inputs.ones([2, 2, 16, 16, 8]), inputs.ones([2, 1, 1, 1, 1]), inputs.ones([2, 2, 16, 16, 8]), transpose(1, 2));
            0.21 float_tanh (inputs.points());
            0.21 gelu (inputs.points());
            0.21 float_atan (inputs.points());
            0.21 float_atan2 (inputs.points(), inputs.values(vec![256.0; 12], [12]));
            0.21 gelu_backward
                (inputs.points(), inputs.ones([12]))
                (inputs.spread(-6.0..=6.0), inputs.varied([SPREAD]));
            0.21 sigmoid_backward (inputs.spread(0.0..=1.0), inputs.varied([SPREAD]));
            0.21 log_sigmoid_backward
                (inputs.points(), inputs.ones([12]))
                (inputs.spread(-10.0..=10.0), inputs.varied([SPREAD]));
            0.21 float_mul_scalar (inputs.spread(1.0..=2.0), ROUNDED.into());
            0.21 float_div_scalar
                (inputs.spread(1.0..=2.0), ROUNDED.into())
                (inputs.spread(1.0..=2.0), ROUNDED.recip().into());
            0.21 leaky_relu (inputs.spread(-2.0..=-1.0), (ROUNDED / 2.0).into());
            0.21 float_sqrt (inputs.varied([64])) (inputs.ends([1]));
            0.21 layer_norm
                (inputs.varied([8, 256]), inputs.varied([256]), Some(inputs.varied([256])), 1e-5)
                (inputs.values((0..512).map(|i| i as f32 * 100.0).collect(), [1, 512]), inputs.ones([512]), None, 1e-5);
            0.21 avg_pool1d
                (inputs.varied([1, 2, N]), 64, 64, 0, true, false)
                (inputs.ones([1, 1, N]), N, N, 0, true, false)
                (inputs.ends([1, 1, 64]), 4, 4, 0, true, false)
                from 0.23
                (inputs.varied([1, 2, N]), 64, 64, 0, 1, true, false)
                (inputs.ones([1, 1, N]), N, N, 0, 1, true, false)
                (inputs.ends([1, 1, 64]), 4, 4, 0, 1, true, false);
            0.21 avg_pool2d
                (inputs.varied([1, 2, 64, 64]), [8, 8], [8, 8], [0, 0], true, false)
                (inputs.ones([1, 1, 64, 64]), [64, 64], [64, 64], [0, 0], true, false)
                (inputs.ends([1, 1, 8, 8]), [2, 2], [2, 2], [0, 0], true, false)
                from 0.23
                (inputs.varied([1, 2, 64, 64]), [8, 8], [8, 8], [0, 0], [1, 1], true, false)
                (inputs.ones([1, 1, 64, 64]), [64, 64], [64, 64], [0, 0], [1, 1], true, false)
                (inputs.ends([1, 1, 8, 8]), [2, 2], [2, 2], [0, 0], [1, 1], true, false);
            0.23 avg_pool3d
                (inputs.varied([1, 2, 16, 16, 16]), [4, 4, 4], [4, 4, 4], [0, 0, 0], [1, 1, 1], true, false)
                (inputs.ones([1, 1, 16, 16, 16]), [16, 16, 16], [16, 16, 16], [0, 0, 0], [1, 1, 1], true, false)
                (inputs.ends([1, 1, 4, 4, 4]), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], true, false);
            0.21 avg_pool1d_backward
                (inputs.ones([1, 1, 127]), inputs.varied([1, 1, 64]), 64, 1, 0, true, false)
                from 0.23
                (inputs.ones([1, 1, 127]), inputs.varied([1, 1, 64]), 64, 1, 0, 1, true, false);
            0.21 avg_pool2d_backward
                (inputs.ones([1, 1, 15, 15]), inputs.varied([1, 1, 8, 8]), [8, 8], [1, 1], [0, 0], true, false)
                from 0.23
                (inputs.ones([1, 1, 15, 15]), inputs.varied([1, 1, 8, 8]), [8, 8], [1, 1], [0, 0], [1, 1], true, false);
            0.23 avg_pool3d_backward
                (inputs.ones([1, 1, 7, 7, 7]), inputs.varied([1, 1, 4, 4, 4]), [4, 4, 4], [1, 1, 1], [0, 0, 0], [1, 1, 1], true, false);
            0.21 adaptive_avg_pool1d
                (inputs.varied([1, 2, N]), 64)
                (inputs.ones([1, 1, N]), 1)
                (inputs.ends([1, 1, 64]), 16);
            0.21 adaptive_avg_pool2d
                (inputs.varied([1, 2, 64, 64]), [8, 8])
                (inputs.ones([1, 1, 64, 64]), [1, 1])
                (inputs.ends([1, 1, 8, 8]), [4, 4]);
            0.22 adaptive_avg_pool3d
                (inputs.varied([1, 2, 16, 16, 16]), [4, 4, 4])
                (inputs.ones([1, 1, 16, 16, 16]), [1, 1, 1])
                (inputs.ends([1, 1, 4, 4, 4]), [2, 2, 2]);
            0.21 adaptive_avg_pool1d_backward
                (inputs.ones([1, 1, 64]), inputs.varied([1, 1, 24]))
                (inputs.ones([1, 1, 1]), inputs.ones([1, 1, N]));
            0.21 adaptive_avg_pool2d_backward
                (inputs.ones([1, 1, 16, 16]), inputs.varied([1, 1, 12, 12]))
                (inputs.ones([1, 1, 1, 1]), inputs.ones([1, 1, 64, 64]));
            0.22 adaptive_avg_pool3d_backward
                (inputs.ones([1, 1, 8, 8, 8]), inputs.varied([1, 1, 6, 6, 6]))
                (inputs.ones([1, 1, 1, 1, 1]), inputs.ones([1, 1, 16, 16, 16]));
        }
    };

    (names |$inputs:ident| $(
        $since:tt $op:ident $($kind:ident)? $(($($argument:tt)*))+ $(from $later:tt $(($($changed:tt)*))+)?;
    )*) => {
        /// The tried operations, each with the kind of calls that are tried.
        pub const TRIED: [(&str, Kind); [$(stringify!($op)),*].len()] =
            [$((stringify!($op), $crate::trials!(kind $($kind)?))),*];
    };

    (Burn $burn:tt |$inputs:ident| $(
        $since:tt $op:ident $($kind:ident)? $(($($argument:tt)*))+ $(from $later:tt $(($($changed:tt)*))+)?;
    )*) => {
        fn trials(
            op: $crate::policy::trials::TriedOp,
        ) -> ::std::vec::Vec<$crate::policy::trials::Trial<Self>> {
            use $crate::policy::trials::{Kind, N, ROUNDED, SPREAD, Trial};

            $($crate::trials! { if Burn $burn has $since {
                if (op.name(), op.kind()) == (stringify!($op), $crate::trials!(kind $($kind)?)) {
                    let trials: &[Trial<Self>] = $crate::trials! {
                        if Burn $burn has $($later)? {
                            &[$($(|$inputs| B::$op($($changed)*)),+)?]
                        } else {
                            &[$(|$inputs| B::$op($($argument)*)),+]
                        }
                    };
                    return trials.to_vec();
                }
            } else {} })*
            ::std::vec::Vec::new()
        }
    };

    (kind) => { Kind::Usual };
    (kind few) => { Kind::FewChannels };
    (kind grouped) => { Kind::Grouped };
    (kind small) => { Kind::SmallBatch };
    (kind strided) => { Kind::Strided };

    // Operations that a version of Burn lacks are left out. A row that no later version changes names no
    // later version.
    (if Burn $burn:tt has { $($then:tt)* } else { $($else:tt)* }) => { $($else)* };
    (if Burn 0.21 has 0.22 { $($then:tt)* } else { $($else:tt)* }) => { $($else)* };
    (if Burn 0.21 has 0.23 { $($then:tt)* } else { $($else:tt)* }) => { $($else)* };
    (if Burn 0.22 has 0.23 { $($then:tt)* } else { $($else:tt)* }) => { $($else)* };
    (if Burn $burn:tt has $since:tt { $($then:tt)* } else { $($else:tt)* }) => { $($then)* };
}

/// A device of a version of Burn as a [`TrialDevice`](super::TrialDevice), `Tried`, in a module whose parent names
/// devices with `name`. A macro, as [`trials!`](crate::trials).
#[doc(hidden)]
#[macro_export]
macro_rules! trial_device {
    (for Burn $burn:tt) => {
        struct Tried<B: Backend>(B::Device);

        impl<B: Backend> TrialDevice for Tried<B> {
            type DType = DType;
            type Tensor = FloatTensor<B>;

            fn name(&self) -> String {
                super::name::<B>(&self.0)
            }

            fn tensor(&self, values: Vec<f32>, shape: Vec<usize>) -> FloatTensor<B> {
                B::float_from_data(TensorData::new(values, shape), &self.0)
            }

            fn cast(&self, tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
                B::float_cast(tensor, dtype.into())
            }

            fn read(&self, tensor: FloatTensor<B>) -> Option<Vec<f32>> {
                let data = try_read_sync(B::float_into_data(tensor))?.ok()?;
                Some(data.iter::<f32>().collect())
            }

            $crate::trials! { for Burn $burn }
        }

        fn conv<const D: usize>(stride: usize, groups: usize) -> ConvOptions<D> {
            ConvOptions::new([stride; D], [0; D], [1; D], groups)
        }

        fn transpose<const D: usize>(stride: usize, groups: usize) -> ConvTransposeOptions<D> {
            ConvTransposeOptions::new([stride; D], [0; D], [0; D], [1; D], groups)
        }
    };
}

use super::Kind;

trials! { for names }
