package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// Times are the limits and intervals; each has a default.
type Times struct {
	List      time.Duration // between full comparisons with the engine; 15 s
	Heartbeat time.Duration // between notes of "seen to run" on disk; 10 s
	Facts     time.Duration // between looks at the host; 5 s
	Ready     time.Duration // for carrel-init to answer after the start; 60 s
	Stall     time.Duration // longest pause without progress in a pull; 3 min
	Retry     time.Duration // first wait before another try, doubled up to RetryMost; 250 ms
	RetryMost time.Duration // 10 s
	Wait      time.Duration // between looks at what a run waits for; 500 ms
	Progress  time.Duration // least time between two reports of one pull's progress; 500 ms
}

func (t *Times) setDefaults() {
	for _, s := range []struct {
		at *time.Duration
		d  time.Duration
	}{
		{&t.List, 15 * time.Second},
		{&t.Heartbeat, 10 * time.Second},
		{&t.Facts, 5 * time.Second},
		{&t.Ready, time.Minute},
		{&t.Stall, 3 * time.Minute},
		{&t.Retry, 250 * time.Millisecond},
		{&t.RetryMost, 10 * time.Second},
		{&t.Wait, 500 * time.Millisecond},
		{&t.Progress, 500 * time.Millisecond},
	} {
		if *s.at <= 0 {
			*s.at = s.d
		}
	}
}

// Options set up a [Host].
type Options struct {
	DataDir  string // absolute; the agent's own
	InitFile string // carrel-init, in a directory named by its hash
	Passwd   string // the host's logins; default /etc/passwd
	Version  string // the agent's
	Policy   Policy
	Signer   *Signer
	Times    Times
	Problems []string // found by whoever set this up, shown with the host's facts
	Log      *slog.Logger
}

// Parts are the edges that a [Host] works through.
type Parts struct {
	Runtime Runtime
	GPUs    GPUs
	Inside  Inside
	Clock   Clock
	Journal *Journal
}

// Host makes one machine match its desired state. Nothing happens before Run.
type Host struct {
	opts        Options
	log         *slog.Logger
	runtime     Runtime
	gpus        GPUs
	inside      Inside
	clock       Clock
	journal     *Journal
	puller      *puller
	volumesWake chan struct{}
	factsWake   chan struct{}
	probeWake   chan struct{} // the engine connected
	probeDevice chan struct{} // a device appeared that the engine was not tried with
	applying    sync.Mutex    // one set at a time

	mu          sync.Mutex
	desired     map[Key]*Desired
	versions    map[Key]int64 // of what carrel-init should know
	applied     bool          // a set came since the agent started
	deployment  string
	volumesGone map[string]bool
	exclusions  []string
	workers     map[Key]*worker
	running     context.Context // of Run; nil before and after
	wg          sync.WaitGroup
	silentSince Moment // zero while the engine answers
	heldDevices map[string]Key
	heldVolumes map[string]Key
	strangers   map[string]Unmanaged // by container id
	facts       Facts
	factsSeq    int64
	factsMoved  chan struct{}
	info        EngineInfo
	infoAt      Moment // zero: never asked
	probeResult ProbeResult
	probeDone   bool
	// probeHadDevice: a try was made with a device, so that probeResult.GPU says something.
	probeHadDevice bool
}

// New makes a host of what the journal knows.
func New(opts Options, parts Parts) (*Host, error) {
	opts.Times.setDefaults()
	if opts.Passwd == "" {
		opts.Passwd = "/etc/passwd"
	}
	if faults := opts.Policy.Check(); len(faults) > 0 {
		return nil, Errorf(KindInvalid, "host policy: %v", faults)
	}
	h := &Host{
		opts: opts, log: opts.Log, runtime: parts.Runtime, gpus: parts.GPUs, inside: parts.Inside, clock: parts.Clock,
		journal: parts.Journal, puller: newPuller(parts.Runtime, opts.Times.Stall),
		volumesWake: make(chan struct{}, 1), factsWake: make(chan struct{}, 1),
		probeWake: make(chan struct{}, 1), probeDevice: make(chan struct{}, 1), factsMoved: make(chan struct{}),
		desired: map[Key]*Desired{}, versions: map[Key]int64{}, volumesGone: map[string]bool{}, workers: map[Key]*worker{},
		heldDevices: map[string]Key{}, heldVolumes: map[string]Key{}, strangers: map[string]Unmanaged{},
	}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	if err := errors.Join(h.makeRoots(), h.sweepVolumes()); err != nil {
		return nil, err
	}
	for _, r := range h.journal.Records((*Record).live) {
		for _, g := range r.Devices {
			h.heldDevices[g.ID] = r.Key
		}
		for _, v := range r.Volumes {
			h.heldVolumes[v] = r.Key
		}
	}
	return h, nil
}

// Run works until ctx ends, and returns when all that it started has ended. Containers go on.
func (h *Host) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h.mu.Lock()
	if h.running != nil {
		h.mu.Unlock()
		return errors.New("the host runs already")
	}
	h.running = ctx
	h.syncWorkers()
	for _, loop := range []func(context.Context){h.eventLoop, h.listLoop, h.heartbeatLoop, h.volumeLoop, h.factsLoop, h.probeLoop} {
		h.wg.Go(func() { loop(ctx) })
	}
	h.mu.Unlock()
	<-ctx.Done()
	h.wg.Wait()
	h.puller.wait()
	h.mu.Lock()
	h.running = nil
	h.mu.Unlock()
	return errors.Join(h.journal.Commit(), context.Cause(ctx))
}

// Apply takes a full desired state. When it returns nil the stamp is on disk; what follows is told by Observe.
func (h *Host) Apply(_ context.Context, stamp Stamp, set Set) (Stamp, error) {
	h.applying.Lock()
	defer h.applying.Unlock()
	err := checkSet(set)
	if err == nil {
		err = h.journal.SetStamp(stamp)
	}
	highest, _ := h.journal.Stamp()
	if err != nil {
		return highest, fmt.Errorf("apply: %w", err)
	}
	h.mu.Lock()
	before := h.desired
	h.desired = make(map[Key]*Desired, len(set.Runs))
	for i := range set.Runs {
		d := &set.Runs[i]
		h.desired[d.Key] = d
		if old := before[d.Key]; old == nil || !sameInside(old, d) {
			h.versions[d.Key]++
		}
	}
	for k := range h.versions {
		if h.desired[k] == nil {
			delete(h.versions, k)
		}
	}
	h.volumesGone = map[string]bool{}
	for _, id := range set.VolumesGone {
		h.volumesGone[id] = true
	}
	h.exclusions, h.deployment, h.applied = set.ExcludedDevices, set.Deployment, true
	h.syncWorkers()
	workers := make([]*worker, 0, len(h.workers))
	for _, w := range h.workers {
		workers = append(workers, w)
	}
	h.mu.Unlock()
	for _, w := range workers {
		w.desiredChanged()
	}
	wake(h.volumesWake)
	wake(h.factsWake)
	return highest, nil
}

// sameInside reports whether carrel-init needs to hear nothing new.
func sameInside(a, b *Desired) bool {
	return equalJSON(insideConfig(a), insideConfig(b))
}

// syncWorkers starts a worker for each run that is wanted, or that may hold something. The caller holds the lock.
func (h *Host) syncWorkers() {
	if h.running == nil || h.running.Err() != nil {
		return
	}
	start := func(k Key) {
		if h.workers[k] != nil {
			return
		}
		w := newWorker(h, k)
		h.workers[k] = w
		h.wg.Go(func() { w.loop(h.running) })
	}
	for k := range h.desired {
		if r, ok := h.journal.Record(k); !ok || r.Phase != PhaseGone {
			start(k)
		}
	}
	for _, r := range h.journal.Records(func(r *Record) bool { return r.Phase != PhaseGone }) {
		start(r.Key)
	}
}

// workerDone forgets a worker whose run is gone.
func (h *Host) workerDone(w *worker) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.workers[w.key] == w {
		delete(h.workers, w.key)
	}
}

func (h *Host) desiredOf(k Key) (*Desired, int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.desired[k], h.versions[k]
}

// known reports whether a gateway has said what is wanted since the agent started.
func (h *Host) known() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.applied
}

func (h *Host) excluded() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.exclusions
}

// Excluded reports whether an admin took a device out of use.
func (h *Host) Excluded(id string) bool {
	for _, e := range h.excluded() {
		if e == id {
			return true
		}
	}
	return false
}

// RunOfContainer names the run, as [Key.String] does, of a container of ours by its full id.
func (h *Host) RunOfContainer(id string) (string, bool) {
	rs := h.journal.Records(func(r *Record) bool { return r.ContainerID == id && r.Phase != PhaseGone })
	if len(rs) == 0 {
		return "", false
	}
	return rs[0].Key.String(), true
}

// take claims a run's devices and volumes on this host, all or none. A device is given to one container at a time, whatever
// a gateway says.
func (h *Host) take(d *Desired) (busy string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	volumes := writes(d)
	for _, g := range d.Devices {
		if k, held := h.heldDevices[g.ID]; held && k != d.Key {
			return fmt.Sprintf("device %s is still held by %s", g.ID, k.Container())
		}
		for _, u := range h.strangers {
			if u.Key != d.Key && slices.Contains(u.Devices, g.ID) {
				return fmt.Sprintf("device %s is held by the container %s, which the gateway does not know", g.ID, u.Name)
			}
		}
	}
	for _, v := range volumes {
		if k, held := h.heldVolumes[v]; held && k != d.Key {
			return fmt.Sprintf("volume %s is still in use by %s", v, k.Container())
		}
	}
	for _, g := range d.Devices {
		h.heldDevices[g.ID] = d.Key
	}
	for _, v := range volumes {
		h.heldVolumes[v] = d.Key
	}
	return ""
}

// give gives back what take claimed and wakes those who wait for it.
func (h *Host) give(k Key) {
	h.mu.Lock()
	for id, holder := range h.heldDevices {
		if holder == k {
			delete(h.heldDevices, id)
		}
	}
	for id, holder := range h.heldVolumes {
		if holder == k {
			delete(h.heldVolumes, id)
		}
	}
	workers := make([]*worker, 0, len(h.workers))
	for _, w := range h.workers {
		workers = append(workers, w)
	}
	h.mu.Unlock()
	for _, w := range workers {
		w.wakeUp()
	}
	wake(h.volumesWake)
}

// answered notes whether the engine answered, and returns the error's kind.
func (h *Host) answered(err error) Kind { return KindOf(h.heard(err)) }

// heard notes whether the engine answered, and returns the error as it came.
func (h *Host) heard(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	silent := KindOf(err) == KindUnavailable
	h.mu.Lock()
	was := !h.silentSince.IsZero()
	switch {
	case silent && !was:
		h.silentSince = h.clock.Now()
	case !silent:
		h.silentSince = Moment{}
	}
	h.mu.Unlock()
	if silent == was {
		return err
	}
	if silent {
		h.log.Warn("the container engine gives no answer", "error", err)
	} else {
		h.log.Info("the container engine answers again")
	}
	for _, r := range h.journal.Records(func(r *Record) bool { return r.Phase != PhaseGone }) {
		h.journal.Change(r.Key, func(r *Record) { r.silent = silent })
	}
	wake(h.factsWake)
	return err
}

// after is a timer with up to a fifth of jitter, so that hosts and runs do not act in step.
func (h *Host) after(d time.Duration) <-chan time.Time {
	return time.After(d - time.Duration(rand.Int64N(int64(d)/5+1)))
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a wake-up is pending
	}
}

// DeviceHeld reports whether a run of this host has a device now.
func (h *Host) DeviceHeld(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, held := h.heldDevices[id]
	return held
}
