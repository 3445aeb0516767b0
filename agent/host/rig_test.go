package host_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

// clock is the bubble's time, with a boot that can change and a wall clock that can be set.
type clock struct {
	mu   sync.Mutex
	boot string
	base time.Time // when the boot began
	skew time.Duration
}

func (c *clock) Now() host.Moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	return host.Moment{Boot: c.boot, Up: now.Sub(c.base), Wall: now.Add(c.skew)}
}

func (c *clock) wall() time.Time { return c.Now().Wall }

func (c *clock) reboot(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.boot, c.base = name, time.Now()
}

func (c *clock) set(skew time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.skew = skew
}

// inside answers for carrel-init.
type inside struct {
	dir string

	mu      sync.Mutex
	config  map[host.Key][]host.InsideConfig
	pids    map[host.Key]int
	stops   []string
	forgot  []host.Key
	answer  func(context.Context) (host.InsideAnswer, error)
	stopErr error
}

func (i *inside) Prepare(k host.Key) (string, error) {
	dir := filepath.Join(i.dir, k.Container())
	return dir, os.MkdirAll(dir, 0o700)
}

func (i *inside) Attach(k host.Key, pid int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.pids[k] = pid
	return nil
}

func (i *inside) Configure(ctx context.Context, k host.Key, c host.InsideConfig) (host.InsideAnswer, error) {
	i.mu.Lock()
	i.config[k] = append(i.config[k], c)
	answer := i.answer
	i.mu.Unlock()
	if answer != nil {
		return answer(ctx)
	}
	return host.InsideAnswer{Sudo: "yes", Shell: "/bin/sh"}, nil
}

func (i *inside) Stop(_ context.Context, k host.Key, reason string, _ time.Duration) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.stops = append(i.stops, k.String()+": "+reason)
	return i.stopErr
}

func (i *inside) Forget(k host.Key) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.forgot = append(i.forgot, k)
}

// devices is a source whose answers a test sets.
type devices struct {
	mu        sync.Mutex
	inventory gpu.Inventory
	samples   []gpu.Sample
}

func (d *devices) Inventory(context.Context) (gpu.Inventory, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	inv := d.inventory
	inv.Devices = slices.Clone(inv.Devices)
	return inv, nil
}

func (d *devices) Sample(context.Context) ([]gpu.Sample, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.samples), nil
}

func (d *devices) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

const (
	reference = "registry.example.com/team/torch:2.6"
	simOne    = "SIM-00000000-0000-0000-0000-000000000001"
	simTwo    = "SIM-00000000-0000-0000-0000-000000000002"
)

// rig is one machine with an agent that can die and come back.
type rig struct {
	t       *testing.T
	dir     string
	clock   *clock
	engine  *hosttest.Engine
	inside  *inside
	gpus    *devices
	opts    host.Options
	host    *host.Host
	journal *host.Journal
	cancel  context.CancelFunc
	done    chan error
	stamp   host.Stamp
}

// bubble runs a test on fake time.
func bubble(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := &rig{
			t: t, dir: dir, clock: &clock{boot: "boot-1", base: time.Now().Add(-time.Hour)},
			inside: &inside{dir: dir, config: map[host.Key][]host.InsideConfig{}, pids: map[host.Key]int{}},
			gpus:   &devices{inventory: gpu.Inventory{Source: gpu.SourceSimulated}},
			stamp:  host.Stamp{Database: 1, Session: 1},
		}
		signer, err := host.NewSigner("h1", []byte("0123456789abcdef0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		passwd := filepath.Join(dir, "passwd")
		if err := os.WriteFile(passwd, []byte("root:x:0:0::/root:/bin/sh\nbea:x:12345:12345::/home/bea:/bin/sh\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		r.opts = host.Options{
			DataDir: filepath.Join(dir, "data"), InitFile: "/opt/carrel-init", Passwd: passwd, Version: "test", Signer: signer,
			Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo})),
		}
		r.engine = hosttest.NewEngine(r.clock.wall)
		r.engine.AddImage(host.Image{ID: hosttest.ID("torch"), Bytes: 1 << 30}, "registry.example.com/team/torch@"+hosttest.ID("torch-digest"))
		r.start()
		defer r.kill()
		test(t, r)
	})
}

func (r *rig) start() {
	r.t.Helper()
	if err := os.MkdirAll(r.opts.DataDir, 0o700); err != nil {
		r.t.Fatal(err)
	}
	var err error
	if r.journal, err = host.OpenJournal(r.opts.DataDir, r.clock.Now()); err != nil {
		r.t.Fatal(err)
	}
	r.host, err = host.New(r.opts, host.Parts{Runtime: r.engine, GPUs: r.gpus, Inside: r.inside, Clock: r.clock, Journal: r.journal})
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel, r.done = cancel, make(chan error, 1)
	go func() { r.done <- r.host.Run(ctx) }()
	synctest.Wait()
}

// kill ends the agent; containers go on.
func (r *rig) kill() {
	if r.cancel == nil {
		return
	}
	r.cancel()
	if err := <-r.done; !errors.Is(err, context.Canceled) {
		r.t.Errorf("run: %v", err)
	}
	r.cancel = nil
}

func (r *rig) restart() {
	r.t.Helper()
	r.kill()
	r.start()
}

// run is a run that works.
func run(workspace string, epoch int64) host.Desired {
	return host.Desired{
		Key: host.Key{Workspace: workspace, Epoch: epoch}, Goal: host.GoalRunning, Name: "fraud", Owner: "ana", ImageReference: reference,
		ImageDigest: hosttest.ID("torch-digest"), Identity: host.Identity{Login: "ana", UID: int64(os.Getuid()) + 10001, GID: 10001},
		CPUMillis: 1000, MemoryMiB: 1024, ShmMiB: 512, PidsLimit: 4096, StopGrace: 10 * time.Second, Project: "default", Pool: "default",
		Mounts: []host.Mount{{Volume: "v-" + workspace, Target: "/home/ana", Home: true, Name: "fraud-home"}},
	}
}

func gone(d host.Desired) host.Desired {
	d.Goal, d.Reason = host.GoalGone, "stopped by ana"
	return d
}

func (r *rig) apply(runs ...host.Desired) {
	r.t.Helper()
	r.applySet(host.Set{Runs: runs})
}

func (r *rig) applySet(set host.Set) {
	r.t.Helper()
	r.stamp.Generation++
	if _, err := r.host.Apply(r.t.Context(), r.stamp, set); err != nil {
		r.t.Fatal(err)
	}
}

// seen is all that one call of Observe tells.
type seen struct {
	runs    map[host.Key]host.Observed
	facts   host.Facts
	seq     int64
	removed []string
	journal string
	batches int
}

func (r *rig) observe(after int64) seen {
	r.t.Helper()
	s := seen{runs: map[host.Key]host.Observed{}}
	complete := 0
	err := r.host.Observe(r.t.Context(), after, time.Millisecond, func(b host.Batch) error {
		s.batches++
		if b.Facts != nil {
			s.facts = *b.Facts
		}
		for _, o := range b.Runs {
			s.runs[o.Key] = o
		}
		if b.Complete {
			complete++
		}
		s.seq, s.journal, s.removed = b.Seq, b.JournalID, append(s.removed, b.VolumesRemoved...)
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if complete != 1 && len(s.runs) < host.ObserveRecords {
		r.t.Errorf("%d times complete", complete)
	}
	return s
}

func (r *rig) of(k host.Key) host.Observed { return r.observe(0).runs[k] }

// within waits until a run is as it should be, for the given time at most.
func (r *rig) within(limit time.Duration, k host.Key, what string, ok func(host.Observed) bool) host.Observed {
	r.t.Helper()
	deadline := time.Now().Add(limit)
	for {
		synctest.Wait()
		o := r.of(k)
		if ok(o) {
			return o
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("not %s within %s: %+v; containers %v", what, limit, o, r.engine.Names())
		}
		pass(50 * time.Millisecond)
	}
}

func (r *rig) ready(k host.Key) host.Observed {
	r.t.Helper()
	return r.within(time.Minute, k, "ready", func(o host.Observed) bool { return o.Phase == host.PhaseReady })
}

func (r *rig) gone(k host.Key) host.Observed {
	r.t.Helper()
	return r.within(time.Minute, k, "gone", func(o host.Observed) bool { return o.Phase == host.PhaseGone })
}

func (r *rig) wantNames(want ...string) {
	r.t.Helper()
	slices.Sort(want)
	if got := r.engine.Names(); !slices.Equal(got, want) {
		r.t.Errorf("containers %v, want %v", got, want)
	}
}

func (r *rig) count(call string) int {
	n := 0
	for _, c := range r.engine.Calls() {
		if c == call {
			n++
		}
	}
	return n
}

func wantReason(t *testing.T, o host.Observed, code string) {
	t.Helper()
	if o.Reason.Code != code || o.Reason.Message == "" {
		t.Errorf("reason %+v, want code %s; %+v", o.Reason, code, o)
	}
}

// about compares ages: what happened d ago, give or take slack.
func about(t *testing.T, what string, got *time.Duration, want, slack time.Duration) {
	t.Helper()
	if got == nil || (*got-want).Abs() > slack {
		t.Errorf("%s: %v ago, want %s", what, fmt.Sprint(deref(got)), want)
	}
}

func deref(d *time.Duration) any {
	if d == nil {
		return nil
	}
	return *d
}

func keys[V any](m map[host.Key]V) []host.Key {
	return slices.SortedFunc(maps.Keys(m), func(a, b host.Key) int { return int(a.Epoch - b.Epoch) })
}

// pass lets the bubble's time go on.
func pass(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // fake time: everything else comes to rest first
