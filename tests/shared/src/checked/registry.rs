//! The state of each checked device: the half dtypes that it supports, and counts of what has run on
//! it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn_backend::{DType, DTypeUsage, DTypeUsageSet, Device, DeviceId, DeviceOps, Shape};

/// A device of [`Checked`](super::Checked). All of them are the CPU; each has its own support of
/// half dtypes, random stream and counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct CheckedDevice {
    id: u16,
}

/// The operations, casts and reads of a device since it was made or reset.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    ops: HashMap<(&'static str, DType), usize>,
    casts: HashMap<(DType, DType), Casts>,
    /// Reads of data from the device.
    pub reads: Reads,
    /// FP32 tensors that were cast to a half dtype, and how often.
    to_half: HashMap<(u64, DType), (Shape, usize)>,
    times: HashMap<(&'static str, DType), Duration>,
}

/// Casts from one dtype to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Casts {
    pub count: usize,
    pub elements: usize,
}

/// Tensors whose data was read, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reads {
    pub float: usize,
    pub int: usize,
    pub bool: usize,
}

/// Called before each operation, with its name and dtype.
type Hook = Arc<dyn Fn(&'static str, DType) + Send + Sync>;

/// What of a result is wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Fault {
    /// All of it.
    #[default]
    All,
    /// A block of the last two dimensions, between a half and three quarters of each.
    Block,
    /// The end of the last dimension.
    LastColumn,
}

/// Whether a kernel is wrong: by its name, its dtype and the shapes of its float operands.
pub type Wrong = fn(&'static str, DType, &[Shape]) -> bool;

#[derive(Clone)]
struct State {
    name: &'static str,
    f16: DTypeUsageSet,
    bf16: DTypeUsageSet,
    seed: u64,
    draws: u64,
    counts: Counts,
    hook: Option<Hook>,
    wrong: Wrong,
    fault: Fault,
    unreadable: bool,
    timed: bool,
}

static DEVICES: LazyLock<Mutex<HashMap<u16, State>>> = LazyLock::new(Mutex::default);
/// The default device is 0.
static NEXT_ID: AtomicU16 = AtomicU16::new(1);

impl CheckedDevice {
    /// A device that nobody else uses, with arithmetic in both half dtypes.
    pub fn new() -> Self {
        Self::with_support(DTypeUsage::general(), DTypeUsage::general())
    }

    /// A device that nobody else uses, which reports and enforces this support.
    pub fn with_support(f16: DTypeUsageSet, bf16: DTypeUsageSet) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let state = State {
            f16,
            bf16,
            ..State::default()
        };
        devices().insert(id, state);
        Self { id }
    }

    /// Sets the name that the backend reports from now on.
    pub fn set_name(&self, name: &'static str) {
        self.with(|state| state.name = name);
    }

    pub(super) fn name(&self) -> &'static str {
        self.with(|state| state.name)
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        self.with(|state| state.counts.clone())
    }

    /// Counts from zero again.
    pub fn reset(&self) {
        self.with(|state| state.counts = Counts::default());
    }

    /// Calls `hook` before each operation from now on, with its name and dtype.
    pub fn before_each(&self, hook: impl Fn(&'static str, DType) + Send + Sync + 'static) {
        self.with(|state| state.hook = Some(Arc::new(hook)));
    }

    /// Removes the hook.
    pub fn without_hook(&self) {
        self.with(|state| state.hook = None);
    }

    /// Makes the results of some kernels wrong from now on, by two percent.
    pub fn set_wrong(&self, wrong: Wrong) {
        self.with(|state| state.wrong = wrong);
    }

    /// Sets what of these results is wrong.
    pub fn set_fault(&self, fault: Fault) {
        self.with(|state| state.fault = fault);
    }

    pub(super) fn fault(&self) -> Fault {
        self.with(|state| state.fault)
    }

    /// How many random tensors were drawn.
    pub fn draws(&self) -> u64 {
        self.with(|state| state.draws)
    }

    pub(super) fn is_wrong(&self, op: &'static str, dtype: DType, operands: &[Shape]) -> bool {
        self.with(|state| state.wrong)(op, dtype, operands)
    }

    /// Whether reading data from the device fails from now on.
    pub fn set_unreadable(&self, unreadable: bool) {
        self.with(|state| state.unreadable = unreadable);
    }

    /// Whether operations are timed from now on, each by itself.
    pub fn set_timed(&self, timed: bool) {
        self.with(|state| state.timed = timed);
    }

    pub(super) fn is_timed(&self) -> bool {
        self.with(|state| state.timed)
    }

    pub(super) fn add_time(&self, op: &'static str, dtype: DType, time: Duration) {
        self.with(|state| *state.counts.times.entry((op, dtype)).or_default() += time);
    }

    pub(super) fn is_unreadable(&self) -> bool {
        self.with(|state| state.unreadable)
    }

    /// The support of a dtype, Flex's own where nothing was configured.
    pub(super) fn usage(&self, dtype: DType) -> Option<DTypeUsageSet> {
        match dtype {
            DType::F16 => Some(self.with(|state| state.f16)),
            DType::BF16 => Some(self.with(|state| state.bf16)),
            _ => None,
        }
    }

    pub(super) fn seed(&self, seed: u64) {
        self.with(|state| (state.seed, state.draws) = (seed, 0));
    }

    /// The seed of the next draw. A draw in another dtype gives other numbers, as on a GPU.
    pub(super) fn next_seed(&self, dtype: DType) -> u64 {
        self.with(|state| {
            state.draws += 1;
            let stream = dtype.name().bytes().fold(state.seed, |hash, byte| {
                hash.wrapping_mul(31).wrapping_add(byte.into())
            });
            stream.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ state.draws
        })
    }

    pub(super) fn count_op(&self, op: &'static str, dtype: DType) {
        let hook = self.with(|state| {
            *state.counts.ops.entry((op, dtype)).or_default() += 1;
            state.hook.clone()
        });
        if let Some(hook) = hook {
            hook(op, dtype);
        }
    }

    pub(super) fn count_cast(&self, id: u64, shape: Shape, from: DType, to: DType) {
        self.with(|state| {
            let casts = state.counts.casts.entry((from, to)).or_default();
            casts.count += 1;
            casts.elements += shape.num_elements();
            if from == DType::F32 && matches!(to, DType::F16 | DType::BF16) {
                let times = state.counts.to_half.entry((id, to));
                times.or_insert((shape, 0)).1 += 1;
            }
        });
    }

    pub(super) fn count_read(&self, count: impl FnOnce(&mut Reads)) {
        self.with(|state| count(&mut state.counts.reads));
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(devices().entry(self.id).or_default())
    }
}

impl Counts {
    /// Each operation that took or gave a float tensor, in which dtype and how often.
    pub fn ops(&self) -> impl Iterator<Item = (&'static str, DType, usize)> {
        self.ops.iter().map(|((op, dtype), n)| (*op, *dtype, *n))
    }

    /// How often an operation ran in any dtype.
    pub fn ran(&self, op: &str) -> usize {
        self.ops().filter(|(o, ..)| *o == op).map(|o| o.2).sum()
    }

    /// How often an operation ran in `dtype`.
    pub fn ran_in(&self, op: &str, dtype: DType) -> usize {
        let ops = self.ops().filter(|(o, d, _)| *o == op && *d == dtype);
        ops.map(|o| o.2).sum()
    }

    /// The operations that ran in F16 or BF16.
    pub fn in_half(&self) -> Vec<(&'static str, DType, usize)> {
        self.ops()
            .filter(|(_, dtype, _)| matches!(dtype, DType::F16 | DType::BF16))
            .collect()
    }

    /// How long each operation took in a dtype, where operations are timed.
    pub fn times(&self) -> impl Iterator<Item = (&'static str, DType, Duration)> {
        self.times.iter().map(|((op, dtype), t)| (*op, *dtype, *t))
    }

    /// All casts.
    pub fn casts(&self) -> usize {
        self.casts.values().map(|casts| casts.count).sum()
    }

    /// The casts from one dtype to another.
    pub fn casts_between(&self, from: DType, to: DType) -> Casts {
        self.casts.get(&(from, to)).copied().unwrap_or_default()
    }

    /// The FP32 tensors that were cast to the same half dtype more than once.
    pub fn cast_twice(&self) -> Vec<(&Shape, DType, usize)> {
        self.to_half
            .iter()
            .filter(|(_, (_, times))| *times > 1)
            .map(|((_, dtype), (shape, times))| (shape, *dtype, *times))
            .collect()
    }
}

impl Reads {
    /// Reads of all kinds.
    pub fn total(&self) -> usize {
        self.float + self.int + self.bool
    }
}

impl Device for CheckedDevice {
    fn from_id(device_id: DeviceId) -> Self {
        Self {
            id: device_id.index_id,
        }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(77, self.id)
    }
}

impl DeviceOps for CheckedDevice {}

impl Default for State {
    fn default() -> Self {
        Self {
            name: "checked",
            f16: DTypeUsage::general(),
            bf16: DTypeUsage::general(),
            seed: 0,
            draws: 0,
            counts: Counts::default(),
            hook: None,
            wrong: |_, _, _| false,
            fault: Fault::All,
            unreadable: false,
            timed: false,
        }
    }
}

/// A test that fails while it holds the lock is no reason for the others to fail.
fn devices() -> MutexGuard<'static, HashMap<u16, State>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}
