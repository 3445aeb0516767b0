package sqlite_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"path/filepath"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
	"github.com/carrel-dev/carrel/services/sqlite"
)

var _ lifecycle.Store = (*sqlite.DB)(nil)

// room is a store with users ana and bo, host h1 with devices G0 to G3 and host h2 with none, and a clock.
type room struct {
	*sqlite.DB
	t       testing.TB
	now     time.Time
	ana, bo fleet.User
	h1, h2  fleet.Host
	session map[fleet.HostID]int64
	seq     map[fleet.HostID]int64
}

func newRoom(t testing.TB, change ...func(*sqlite.Options)) *room {
	t.Helper()
	opts := sqlite.Options{Path: filepath.Join(t.TempDir(), "state", "carrel.db"), BallastMiB: -1}
	for _, c := range change {
		c(&opts)
	}
	r := &room{t: t, now: time.Date(2026, 5, 1, 9, 0, 0, 0, time.UTC), session: map[fleet.HostID]int64{}, seq: map[fleet.HostID]int64{}}
	r.DB = open(t, opts)
	r.fill()
	return r
}

func open(t testing.TB, opts sqlite.Options) *sqlite.DB {
	t.Helper()
	db, err := sqlite.Open(context.Background(), opts)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return db
}

func (r *room) fill() {
	r.t.Helper()
	ctx := context.Background()
	made, err := r.AddUsers(ctx, []fleet.User{{Name: "ana"}, {Name: "bo"}}, false, r.now)
	r.ok(err)
	r.ana, r.bo = made[0].User, made[1].User
	r.h1, r.h2 = r.host("h1"), r.host("h2")
	r.facts(r.h1.ID, devices("G0", "G1", "G2", "G3"))
	r.facts(r.h2.ID, nil)
}

func (r *room) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *room) kind(err error, want fleet.Kind) {
	r.t.Helper()
	if !fleet.IsKind(err, want) {
		r.t.Fatalf("error %v, want one of kind %s", err, want)
	}
}

func (r *room) host(name string) fleet.Host {
	r.t.Helper()
	h, err := r.EnsureLocalHost(context.Background(), name, "", make([]byte, 32), r.now)
	r.ok(err)
	session, _, _, err := r.BeginSession(context.Background(), h.ID, r.now)
	r.ok(err)
	r.session[h.ID] = session
	return h
}

func devices(ids ...fleet.DeviceID) []fleet.Device {
	list := make([]fleet.Device, 0, len(ids))
	for i, id := range ids {
		list = append(list, fleet.Device{ID: id, Index: i, Product: "NVIDIA GeForce RTX 4090", Model: "4090", MemoryMiB: 24564, Kind: fleet.KindGPU, Health: fleet.HealthOK})
	}
	return list
}

func (r *room) facts(host fleet.HostID, devices []fleet.Device) {
	r.t.Helper()
	r.observe(fleet.Observation{Host: host, Facts: &fleet.HostFacts{BootID: "boot-1", EngineVersion: "20.10", CPUs: 32, MemoryMiB: 131072, Devices: devices}})
}

// observe sends a batch with the host's session, journal and next sequence number.
func (r *room) observe(obs fleet.Observation) fleet.Changes {
	r.t.Helper()
	if obs.Session == 0 {
		obs.Session = r.session[obs.Host]
	}
	if obs.JournalID == "" {
		obs.JournalID = "journal-1"
	}
	if obs.Seq == 0 {
		r.seq[obs.Host]++
		obs.Seq = r.seq[obs.Host]
	}
	changes, err := r.Observe(context.Background(), obs, r.now, decide)
	r.ok(err)
	return changes
}

// decide is the plain meaning of a record, as the lifecycle has it.
func decide(w fleet.Workspace, run fleet.Run, o fleet.ObservedRun) fleet.Step {
	step := fleet.Step{Run: o, Sudo: o.Sudo}
	switch o.Phase {
	case fleet.PhasePulling:
		step.State = fleet.StatePulling
	case fleet.PhaseStarting:
		step.State = fleet.StateStarting
	case fleet.PhaseReady:
		step.State = fleet.StateRunning
	case fleet.PhaseStopping:
		step.State = fleet.StateStopping
	case fleet.PhaseGone:
		step.Release, step.EndedAt = true, o.EndedAt
		switch {
		case w.Goal == fleet.GoalDeleted:
			step.Delete = true
		case w.Restart:
			step.State, step.Requeue, step.Keep = fleet.StateQueued, true, true
		case w.Goal == fleet.GoalRunning && run.Goal == fleet.GoalStopped:
			step.State, step.Requeue = fleet.StateQueued, true
		case w.Goal == fleet.GoalStopped:
			step.State = fleet.StateStopped
		default:
			step.State, step.Reason = fleet.StateFailed, fleet.Reason{Code: "exited", Message: "the first process ended"}
		}
	}
	if o.Phase != fleet.PhaseGone && w.State == fleet.StateStopping {
		step.State = ""
	}
	return step
}

// create makes a workspace and queues it.
func (r *room) create(owner fleet.User, name string, gpus int, volumes ...fleet.VolumeUse) fleet.Workspace {
	r.t.Helper()
	w, _, err := r.CreateWorkspace(context.Background(), r.order(owner, name, gpus, volumes...), r.now)
	r.ok(err)
	return w
}

func (r *room) order(owner fleet.User, name string, gpus int, volumes ...fleet.VolumeUse) fleet.NewWorkspace {
	id, err := sqlite.NewID(rand.Reader)
	r.ok(err)
	return fleet.NewWorkspace{
		Workspace: fleet.Workspace{
			ID: fleet.WorkspaceID(id), Name: name, Owner: owner.ID,
			Spec: fleet.Spec{Pool: "default", Image: "base", ImageDigest: "sha256:ab", GPU: fleet.GPURequest{Count: gpus}, Volumes: volumes},
		},
		Queue: true, HomeVolume: name + "-home", HomeTarget: "/home/" + owner.Login, StopGrace: 10 * time.Second,
	}
}

// place gives the present run of a workspace devices of a host.
func (r *room) place(w fleet.Workspace, host fleet.HostID, ids ...fleet.DeviceID) fleet.RunKey {
	r.t.Helper()
	w = r.workspace(w.ID)
	p := fleet.Placement{Run: fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch}, Host: host, Devices: ids, CPUMillis: 1000, MemoryMiB: 1024, ShmMiB: 512, PidsLimit: 4096}
	done, err := r.Commit(context.Background(), fleet.Plan{Placements: []fleet.Placement{p}}, r.now)
	r.ok(err)
	if len(done.Placed) != 1 {
		r.t.Fatalf("placement of %s was dropped: %+v", w.Name, done)
	}
	return p.Run
}

func (r *room) workspace(id fleet.WorkspaceID) fleet.Workspace {
	r.t.Helper()
	w, err := r.Workspace(context.Background(), id)
	r.ok(err)
	return w
}

func (r *room) run(key fleet.RunKey) fleet.Run {
	r.t.Helper()
	run, err := r.Run(context.Background(), key)
	r.ok(err)
	return run
}

// said sends one run record from the run's host.
func (r *room) said(o fleet.ObservedRun) fleet.Changes {
	r.t.Helper()
	return r.observe(fleet.Observation{Host: r.run(o.Key).Host, Runs: []fleet.ObservedRun{o}})
}

// ready places and starts a workspace.
func (r *room) ready(w fleet.Workspace, host fleet.HostID, ids ...fleet.DeviceID) fleet.RunKey {
	r.t.Helper()
	key := r.place(w, host, ids...)
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady, ContainerID: "c-" + string(w.ID), StartedAt: r.now, ReadyAt: r.now})
	return key
}

func (r *room) gone(key fleet.RunKey, ended time.Time) fleet.Changes {
	r.t.Helper()
	return r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseGone, EndedAt: ended})
}

func (r *room) stop(id fleet.WorkspaceID, goal fleet.Goal) fleet.Workspace {
	r.t.Helper()
	w, _, err := r.Stop(context.Background(), fleet.StopOrder{Workspace: id, Goal: goal, Reason: fleet.Reason{Code: "stopped_by_user", Message: "stopped by its owner"}}, r.now)
	r.ok(err)
	return w
}

func (r *room) at(clock string) {
	r.t.Helper()
	at, err := time.Parse("15:04:05", clock)
	r.ok(err)
	r.now = time.Date(2026, 5, 1, at.Hour(), at.Minute(), at.Second(), 0, time.UTC)
}

func (r *room) snapshot() fleet.Snapshot {
	r.t.Helper()
	s, err := r.Snapshot(context.Background(), func(fleet.HostID) bool { return true })
	r.ok(err)
	return s
}

func (r *room) leases(id fleet.WorkspaceID) []fleet.Lease {
	r.t.Helper()
	v, err := r.View(context.Background(), id)
	r.ok(err)
	return v.Leases
}

// checked fails unless the ledger says the same as the leases.
func (r *room) checked() {
	r.t.Helper()
	_, differences, err := r.CheckLedger(context.Background(), r.now)
	r.ok(err)
	for _, d := range differences {
		r.t.Error(d)
	}
}

func (r *room) report(q fleet.UsageQuery) fleet.UsageReport {
	r.t.Helper()
	q.Now = r.now
	report, err := r.Report(context.Background(), q)
	r.ok(err)
	return report
}

func hash(secret string) []byte {
	h := sha256.Sum256([]byte(secret))
	return h[:]
}
