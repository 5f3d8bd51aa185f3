// The crates of the selected version of Burn, by Burn's own names. The library and each of its tests and
// examples include this file at their root: a dev-dependency would compile both versions.

/// The Burn that this crate is compiled for, by the feature `burn-0-22`.
#[cfg(feature = "burn-0-22")]
pub extern crate burn_0_22 as burn;
#[cfg(feature = "burn-0-22")]
extern crate burn_backend_0_22 as burn_backend;
#[cfg(feature = "burn-0-22")]
extern crate burn_dispatch_0_22 as burn_dispatch;
#[cfg(feature = "burn-0-22")]
extern crate burn_ir_0_22 as burn_ir;
#[cfg(feature = "burn-0-22")]
extern crate burn_router_0_22 as burn_router;
#[cfg(feature = "burn-0-22")]
extern crate burn_std_0_22 as burn_std;

/// The Burn that this crate is compiled for, by the feature `burn-0-23`.
#[cfg(feature = "burn-0-23")]
pub extern crate burn_0_23 as burn;
#[cfg(feature = "burn-0-23")]
extern crate burn_backend_0_23 as burn_backend;
#[cfg(feature = "burn-0-23")]
extern crate burn_dispatch_0_23 as burn_dispatch;
#[cfg(feature = "burn-0-23")]
extern crate burn_group_0_23 as burn_group;
#[cfg(feature = "burn-0-23")]
extern crate burn_ir_0_23 as burn_ir;
#[cfg(feature = "burn-0-23")]
extern crate burn_router_0_23 as burn_router;
#[cfg(feature = "burn-0-23")]
extern crate burn_std_0_23 as burn_std;
