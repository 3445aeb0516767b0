package sqlite_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

const hour = usage.HourMs

func TestLifeFromCreateToDelete(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 2)
	if w.State != fleet.StateQueued || w.Epoch != 1 || w.OwnerName != "ana" || w.Project != "default" {
		t.Fatalf("created %+v", w)
	}
	s := r.snapshot()
	if len(s.Waiting) != 1 || s.Waiting[0].Name != "w1" || s.Waiting[0].GPULimit >= 0 || s.Waiting[0].Spec.GPU.Count != 2 {
		t.Fatalf("waiting %+v", s.Waiting)
	}
	before, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	key := r.place(w, r.h1.ID, "G0", "G1")
	d, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if d.Stamp.Generation <= before.Stamp.Generation || len(d.Runs) != 1 {
		t.Fatalf("desired %+v after %+v", d, before.Stamp)
	}
	run := d.Runs[0]
	if run.Run.Goal != fleet.GoalRunning || !slices.Equal(run.Run.Devices, []fleet.DeviceID{"G0", "G1"}) || run.Owner.Login != "ana" || !run.PoolSudo ||
		run.Run.ImageDigest != "sha256:ab" || run.Run.MemoryMiB != 1024 || run.Run.StopGrace != 10*time.Second || len(run.Mounts) != 1 || !run.Mounts[0].Home {
		t.Fatalf("desired run %+v", run)
	}
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhasePulling})
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady, ContainerID: "c1", StartedAt: r.now, ReadyAt: r.now, Sudo: "yes"})
	if w = r.workspace(w.ID); w.State != fleet.StateRunning || w.Sudo != "yes" {
		t.Fatalf("running %+v", w)
	}
	s = r.snapshot()
	if s.Held[r.ana.ID] != 2 || len(s.Waiting) != 0 {
		t.Fatalf("snapshot %+v", s)
	}
	h := s.Hosts[0]
	if !h.Usable || h.LeasableDevices != 4 || h.Devices[0].Free || h.Devices[0].HeldBy != "ana/w1" || !h.Devices[2].Free {
		t.Fatalf("host %+v", h)
	}
	if h.CPUMillis != 28800 || h.CPUOnlyReserve != 3200 || h.FreeCPUMillis != 27800 || h.FreeCPUOnly != 3200 || h.FreeMemoryMiB != h.MemoryMiB-1024 {
		t.Fatalf("room of host %+v", h)
	}
	if h2 := s.Hosts[1]; h2.CPUMillis != 32000 || h2.FreeCPUOnly != 32000 {
		t.Fatalf("room of a host without devices %+v", h2)
	}
	r.now = r.now.Add(time.Hour)
	if w = r.stop(w.ID, fleet.GoalDeleted); w.State != fleet.StateStopping {
		t.Fatalf("stopping %+v", w)
	}
	d, err = r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if d.Runs[0].Run.Goal != fleet.GoalStopped || d.Runs[0].Run.GoalReason != "stopped by its owner" {
		t.Fatalf("desired %+v", d.Runs[0].Run)
	}
	changes := r.gone(key, r.now)
	if !changes.Freed || !slices.Contains(changes.Hosts, r.h1.ID) || !slices.Contains(changes.Workspaces, w.ID) {
		t.Fatalf("changes %+v", changes)
	}
	if w = r.workspace(w.ID); w.State != fleet.StateDeleted || w.DeletedAt.IsZero() {
		t.Fatalf("deleted %+v", w)
	}
	d, err = r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if len(d.Runs) != 0 {
		t.Fatalf("a host that holds nothing is still told %+v", d.Runs)
	}
	if got := r.report(fleet.UsageQuery{}).Total.GPUMs; got != 2*hour {
		t.Errorf("%d ms, want 2 hours", got)
	}
	volumes, err := r.Volumes(ctx, r.ana.ID, false)
	r.ok(err)
	if len(volumes) != 1 || volumes[0].Name != "w1-home" || volumes[0].Host != r.h1.ID || len(volumes[0].UsedBy) != 0 {
		t.Errorf("the home is not kept: %+v", volumes)
	}
	events, err := r.Events(ctx, w.ID, 0)
	r.ok(err)
	var states []string
	for _, e := range events {
		states = append(states, string(e.State))
	}
	if got := strings.Join(states, " "); got != "queued pulling running stopping deleted" {
		t.Errorf("events %s", got)
	}
	if again := r.create(r.ana, "w1", 1); again.ReusedVol != "w1-home" {
		t.Errorf("the kept home is not taken again: %+v", again)
	}
	r.checked()
}

func TestCommitDropsWhatNoLongerHolds(t *testing.T) {
	limit := 2
	r := newRoom(t)
	ctx := context.Background()
	_, err := r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &limit; return nil }, r.now)
	r.ok(err)
	w1, w2, w3 := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 2), r.create(r.bo, "w3", 1)
	place := func(w fleet.Workspace, host fleet.HostID, memory int64, ids ...fleet.DeviceID) fleet.Placement {
		return fleet.Placement{Run: fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch}, Host: host, Devices: ids, CPUMillis: 1000, MemoryMiB: memory}
	}
	try := func(placements ...fleet.Placement) fleet.Committed {
		t.Helper()
		done, err := r.Commit(ctx, fleet.Plan{Placements: placements}, r.now)
		r.ok(err)
		return done
	}
	old := place(w1, r.h1.ID, 1024, "G0")
	old.Run.Epoch = 7
	for name, p := range map[string]fleet.Placement{
		"another epoch": old, "too few devices": place(w2, r.h1.ID, 1024, "G0"), "one device twice": place(w2, r.h1.ID, 1024, "G0", "G0"),
		"device elsewhere": place(w1, r.h2.ID, 1024, "G0"), "no such device": place(w1, r.h1.ID, 1024, "G9"), "memory": place(w1, r.h1.ID, 1<<20, "G0"),
		"no such host": place(w1, "h9", 1024, "G0"),
	} {
		if done := try(p); len(done.Placed) != 0 || len(done.Dropped) != 1 || len(done.Hosts) != 0 {
			t.Errorf("%s: %+v", name, done)
		}
	}
	// In one plan: the first takes G0 and one of ana's two, the second is then too many for ana, the third wants the same device.
	done := try(place(w1, r.h1.ID, 1024, "G0"), place(w2, r.h1.ID, 1024, "G1", "G2"), place(w3, r.h1.ID, 1024, "G0"))
	if len(done.Placed) != 1 || len(done.Dropped) != 2 || !slices.Equal(done.Hosts, []fleet.HostID{r.h1.ID}) {
		t.Errorf("one of three should be placed: %+v", done)
	}
	if again := try(place(w1, r.h1.ID, 1024, "G1")); len(again.Placed) != 0 {
		t.Errorf("placed twice: %+v", again)
	}
	r.observe(fleet.Observation{Host: r.h1.ID, Facts: &fleet.HostFacts{
		EngineVersion: "20.10", CPUs: 32, MemoryMiB: 131072, Devices: devices("G0", "G1", "G2"),
		Unmanaged: []fleet.Unmanaged{{Name: "carrel-zzz-1", Devices: []fleet.DeviceID{"G1"}}},
	}})
	if done := try(place(w3, r.h1.ID, 1024, "G1")); len(done.Placed) != 0 {
		t.Errorf("a device that an unmanaged container names was placed: %+v", done)
	}
	if done := try(place(w3, r.h1.ID, 1024, "G3")); len(done.Placed) != 0 {
		t.Errorf("a lost device was placed: %+v", done)
	}
	_, err = r.SetExcluded(ctx, "G2", true, "fan", r.now)
	r.ok(err)
	if done := try(place(w3, r.h1.ID, 1024, "G2")); len(done.Placed) != 0 {
		t.Errorf("an excluded device was placed: %+v", done)
	}
	r.checked()
}

func TestReservationsAreReplacedAndAnEmptyPlanWritesNothing(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 4)
	key := fleet.RunKey{Workspace: w.ID, Epoch: 1}
	plan := fleet.Plan{Reservations: []fleet.Reservation{{Run: key, Host: r.h1.ID, Devices: []fleet.DeviceID{"G0", "G1"}, Since: r.now}}}
	_, err := r.Commit(ctx, plan, r.now)
	r.ok(err)
	if s := r.snapshot(); len(s.Reservations) != 1 || len(s.Reservations[0].Devices) != 2 || !s.Reservations[0].Since.Equal(r.now) {
		t.Fatalf("reservations %+v", s.Reservations)
	}
	_, err = r.Commit(ctx, plan, r.now.Add(time.Hour))
	r.ok(err)
	last, err := r.LastCommit(ctx)
	r.ok(err)
	if !last.Equal(r.now) {
		t.Errorf("a plan without news wrote at %s", last)
	}
	r.stop(w.ID, fleet.GoalStopped)
	if s := r.snapshot(); len(s.Reservations) != 0 || len(s.Waiting) != 0 {
		t.Errorf("a stopped run keeps %+v", s)
	}
}

func TestRestartHandsDevicesOverInOneTransaction(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 2)
	key := r.ready(w, r.h1.ID, "G1", "G3")
	r.now = r.now.Add(time.Hour)
	spec := r.workspace(w.ID).Spec
	spec.MemoryMiB = 2048
	stopping, changes, err := r.Stop(ctx, fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalRunning, Restart: true, Spec: &spec}, r.now)
	r.ok(err)
	if stopping.State != fleet.StateStopping || !stopping.Restart || stopping.Spec.MemoryMiB != 0 || stopping.Pending.MemoryMiB != 2048 || len(changes.Hosts) != 1 {
		t.Fatalf("restarting %+v", stopping)
	}
	r.now = r.now.Add(2 * time.Second)
	r.gone(key, r.now.Add(-time.Second))
	got := r.workspace(w.ID)
	run := r.run(fleet.RunKey{Workspace: w.ID, Epoch: 2})
	if got.State != fleet.StatePulling || got.Epoch != 2 || got.Restart || got.Spec.MemoryMiB != 2048 || run.MemoryMiB != 2048 || run.CPUMillis != 1000 ||
		!slices.Equal(run.Devices, []fleet.DeviceID{"G1", "G3"}) {
		t.Fatalf("restarted %+v %+v", got, run)
	}
	leases := r.leases(w.ID)
	if len(leases) != 4 || !leases[2].ReleasedAt.Equal(leases[0].StartedAt) || !leases[2].EndedAt.Equal(r.now.Add(-time.Second)) {
		t.Fatalf("leases %+v", leases)
	}
	if s := r.snapshot(); s.Held[r.ana.ID] != 2 || len(s.Waiting) != 0 {
		t.Fatalf("snapshot %+v", s)
	}
	r.checked()
}

func TestRestartWaitsWhenItsDevicesCannotBeKept(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	_, _, err := r.Stop(context.Background(), fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalRunning, Restart: true}, r.now)
	r.ok(err)
	r.facts(r.h1.ID, devices("G1", "G2")) // G0 fell off the bus
	r.gone(key, r.now)
	if got := r.workspace(w.ID); got.State != fleet.StateQueued || got.Epoch != 2 {
		t.Fatalf("%+v", got)
	}
	if s := r.snapshot(); len(s.Waiting) != 1 || s.Waiting[0].HomeHost != r.h1.ID || s.Waiting[0].HomeVolume != "w1-home" {
		t.Fatalf("waiting %+v", s.Waiting)
	}
	r.checked()
}

func TestStartWhileStoppingStartsAgainFromTheQueue(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.stop(w.ID, fleet.GoalStopped)
	got, err := r.QueueRun(context.Background(), fleet.StartOrder{Workspace: w.ID}, r.now)
	r.ok(err)
	if got.State != fleet.StateStopping || got.Goal != fleet.GoalRunning {
		t.Fatalf("%+v", got)
	}
	r.gone(key, r.now)
	if got := r.workspace(w.ID); got.State != fleet.StateQueued || got.Epoch != 2 {
		t.Fatalf("%+v", got)
	}
}

func TestLateReportsChangeNothing_REL19(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.stop(w.ID, fleet.GoalStopped)
	healthy := fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady, ContainerID: "c1"}
	session, _, _, err := r.BeginSession(ctx, r.h1.ID, r.now)
	r.ok(err)
	r.session[r.h1.ID] = session
	seq := r.seq[r.h1.ID]
	r.gone(key, r.now)
	for name, obs := range map[string]fleet.Observation{
		"same sequence number": {Seq: seq, Runs: []fleet.ObservedRun{healthy}},
		"older session":        {Session: session - 1, Seq: seq + 100, Runs: []fleet.ObservedRun{healthy}},
		"session to come":      {Session: session + 1, Seq: seq + 100, Runs: []fleet.ObservedRun{healthy}},
	} {
		obs.Host = r.h1.ID
		if changes := r.observe(obs); !changes.Stale || len(changes.Workspaces) != 0 {
			t.Errorf("%s: %+v", name, changes)
		}
	}
	// A journal that began anew repeats a record: the run stays ended, and its host is told to stop what it says it has.
	changes := r.observe(fleet.Observation{Host: r.h1.ID, JournalID: "journal-2", Seq: 1, Runs: []fleet.ObservedRun{healthy}})
	if changes.Stale || len(changes.Workspaces) != 0 || !slices.Contains(changes.Hosts, r.h1.ID) {
		t.Errorf("%+v", changes)
	}
	d, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if len(d.Runs) != 1 || d.Runs[0].Run.Goal != fleet.GoalStopped {
		t.Errorf("desired %+v", d.Runs)
	}
	r.observe(fleet.Observation{Host: r.h1.ID, JournalID: "journal-2", Seq: 2, Runs: []fleet.ObservedRun{{Key: key, Phase: fleet.PhaseGone}}})
	if d, err = r.Desired(ctx, r.h1.ID); err != nil || len(d.Runs) != 0 {
		t.Errorf("desired %+v %v", d.Runs, err)
	}
	if got := r.workspace(w.ID); got.State != fleet.StateStopped {
		t.Errorf("state %s", got.State)
	}
	r.checked()
}

func TestHostSpeaksOnlyOfItsOwnRuns(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	changes := r.observe(fleet.Observation{Host: r.h2.ID, Runs: []fleet.ObservedRun{{Key: key, Phase: fleet.PhaseGone}, {Key: fleet.RunKey{Workspace: "nobody", Epoch: 3}}}})
	if len(changes.Unknown) != 2 || changes.Freed {
		t.Errorf("%+v", changes)
	}
	if got := r.workspace(w.ID); got.State != fleet.StateRunning {
		t.Errorf("state %s", got.State)
	}
	// A device that h1 has is not h2's because h2 says so.
	r.facts(r.h2.ID, devices("G0", "G9"))
	rows, err := r.Devices(context.Background(), deviceFilter(r.h2.ID))
	r.ok(err)
	h, err := r.Host(context.Background(), "h2")
	r.ok(err)
	if len(rows) != 1 || rows[0].ID != "G9" || len(h.Problems) != 1 || !strings.Contains(h.Problems[0], "G0") {
		t.Errorf("devices %+v, problems %v", rows, h.Problems)
	}
}

func TestUnknownRunRaisesTheNextEpoch(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 0)
	r.stop(w.ID, fleet.GoalStopped)
	r.observe(fleet.Observation{Host: r.h1.ID, Runs: []fleet.ObservedRun{{Key: fleet.RunKey{Workspace: w.ID, Epoch: 9}, Phase: fleet.PhaseReady}}})
	got, err := r.QueueRun(context.Background(), fleet.StartOrder{Workspace: w.ID}, r.now)
	r.ok(err)
	if got.Epoch != 10 {
		t.Errorf("epoch %d, want 10: a container of epoch 9 runs somewhere", got.Epoch)
	}
}

func TestFenceEndsLeasesAtTheLastWordAndComesBackClean(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("10:00:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.at("10:30:00")
	r.ok(r.Seen(ctx, r.h1.ID, r.now))
	r.at("12:00:00")
	ended, changes, err := r.Fence(ctx, r.h1.ID, "burnt down", r.now)
	r.ok(err)
	lease := r.leases(w.ID)[0]
	if ended != 1 || !changes.Freed || lease.EndedAt.Format("15:04") != "10:30" || !lease.ReleasedAt.Equal(r.now) {
		t.Fatalf("ended %d, %+v, lease %+v", ended, changes, lease)
	}
	if got := r.workspace(w.ID); got.State != fleet.StateFailed || got.Reason.Code != "host_lost" || !strings.Contains(got.Reason.Message, "burnt down") {
		t.Fatalf("%+v", got)
	}
	if s := r.snapshot(); s.Hosts[0].Usable || s.Hosts[0].Why != "fenced" {
		t.Fatalf("host %+v", s.Hosts[0])
	}
	session, _, _, err := r.BeginSession(ctx, r.h1.ID, r.now)
	r.ok(err)
	r.session[r.h1.ID] = session
	r.observe(fleet.Observation{Host: r.h1.ID, Complete: true, Runs: []fleet.ObservedRun{{Key: key, Phase: fleet.PhaseReady}}})
	d, err := r.Desired(ctx, r.h1.ID)
	r.ok(err)
	if len(d.Runs) != 1 || d.Runs[0].Run.Goal != fleet.GoalStopped {
		t.Fatalf("desired %+v", d.Runs)
	}
	r.observe(fleet.Observation{Host: r.h1.ID, Complete: true, Runs: []fleet.ObservedRun{{Key: key, Phase: fleet.PhaseGone}}})
	if s := r.snapshot(); !s.Hosts[0].Usable {
		t.Fatalf("host %+v", s.Hosts[0])
	}
	r.checked()
}

func TestRetriedCreateReturnsTheFirstAnswer(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	order := r.order(r.ana, "w1", 1)
	order.RequestID, order.Fingerprint = "req-1", "f1"
	first, replay, err := r.CreateWorkspace(ctx, order, r.now)
	r.ok(err)
	if replay {
		t.Fatal("the first is no replay")
	}
	order.Workspace.ID = "another00000"
	second, replay, err := r.CreateWorkspace(ctx, order, r.now)
	r.ok(err)
	if !replay || second.ID != first.ID {
		t.Errorf("replay %v of %s: %s", replay, first.ID, second.ID)
	}
	order.Fingerprint = "f2"
	_, _, err = r.CreateWorkspace(ctx, order, r.now)
	r.kind(err, fleet.KindExists)
	order.RequestID = "req-2"
	_, _, err = r.CreateWorkspace(ctx, order, r.now)
	r.kind(err, fleet.KindExists)
	if !strings.Contains(err.Error(), "carrel up w1") {
		t.Errorf("message %q does not say what to do", err)
	}
	r.now = r.now.Add(25 * time.Hour)
	order.RequestID, order.Fingerprint, order.Workspace.Name, order.Workspace.ID = "req-1", "f3", "w9", "another00001"
	_, replay, err = r.CreateWorkspace(ctx, order, r.now)
	r.ok(err)
	if replay {
		t.Error("a request id is remembered for more than 24 h")
	}
}

func TestChangeSpecKeepsTheRunningSpecAndComparesVersions(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 1)
	spec := w.Spec
	spec.GPU.Count = 0
	got, err := r.ChangeSpec(ctx, fleet.SpecChange{Workspace: w.ID, Spec: spec}, r.now)
	r.ok(err)
	if got.Spec.GPU.Count != 0 || got.Pending.GPU.Count != 0 {
		t.Errorf("a waiting run did not get it: %+v", got)
	}
	r.place(w, r.h1.ID)
	spec.GPU.Count = 3
	version := r.workspace(w.ID).Version
	got, err = r.ChangeSpec(ctx, fleet.SpecChange{Workspace: w.ID, Spec: spec, IfVersion: version}, r.now)
	r.ok(err)
	if got.Spec.GPU.Count != 0 || got.Pending.GPU.Count != 3 {
		t.Errorf("a placed run was changed: %+v", got)
	}
	_, err = r.ChangeSpec(ctx, fleet.SpecChange{Workspace: w.ID, Spec: spec, IfVersion: version}, r.now)
	r.kind(err, fleet.KindConflict)
}

func TestFindWorkspaceByPrefix(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	fraud := r.create(r.ana, "fraud", 0)
	r.create(r.ana, "fraud-two", 0)
	r.create(r.ana, "vision", 0)
	for ref, want := range map[string]string{"fraud": "fraud", "fraud-": "fraud-two", "v": "vision", string(fraud.ID): "fraud"} {
		w, err := r.FindWorkspace(ctx, r.ana.ID, ref)
		if err != nil || w.Name != want {
			t.Errorf("%s: %s %v, want %s", ref, w.Name, err, want)
		}
	}
	_, err := r.FindWorkspace(ctx, r.ana.ID, "f")
	r.kind(err, fleet.KindInvalid)
	if !strings.Contains(err.Error(), "fraud, fraud-two") {
		t.Errorf("message %q does not list the matches", err)
	}
	_, err = r.FindWorkspace(ctx, r.bo.ID, "fraud")
	r.kind(err, fleet.KindNotFound)
}

func TestWorkspacePages(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	for _, name := range []string{"c", "a", "b", "e", "d"} {
		r.create(r.ana, name, 0)
		r.create(r.bo, name, 0)
	}
	var got []string
	for after := ""; ; {
		page, next, err := r.Workspaces(ctx, fleet.WorkspaceFilter{Limit: 3, After: after})
		r.ok(err)
		for _, w := range page {
			got = append(got, w.OwnerName+"/"+w.Name)
		}
		if after = next; next == "" {
			break
		}
	}
	if want := "ana/a ana/b ana/c ana/d ana/e bo/a bo/b bo/c bo/d bo/e"; strings.Join(got, " ") != want {
		t.Errorf("pages %v", got)
	}
	_, _, err := r.Workspaces(ctx, fleet.WorkspaceFilter{After: "rubbish"})
	r.kind(err, fleet.KindInvalid)
}
