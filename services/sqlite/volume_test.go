package sqlite_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

func data(readOnly bool) fleet.VolumeUse {
	return fleet.VolumeUse{Volume: "data", Target: "/data", ReadOnly: readOnly}
}

func TestVolumesOfOneNameAreTwo_CONT10(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	ids := map[fleet.VolumeID]bool{}
	for _, owner := range []fleet.User{r.ana, r.bo} {
		w := r.create(owner, "main", 0, data(false))
		v, err := r.View(ctx, w.ID)
		r.ok(err)
		for _, m := range v.Mounts {
			ids[m.Volume] = true
		}
	}
	if len(ids) != 4 {
		t.Errorf("two homes and two data volumes should be four: %v", ids)
	}
}

func TestVolumeInUseIsNotDeleted_CONT14(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 1, data(false))
	refused := func(state fleet.State) {
		t.Helper()
		if got := r.workspace(w.ID).State; got != state {
			t.Fatalf("state %s, want %s", got, state)
		}
		_, err := r.DeleteVolume(ctx, r.ana.ID, "data", r.now)
		r.kind(err, fleet.KindConflict)
		if !strings.Contains(err.Error(), "w1") {
			t.Errorf("message %q does not name w1", err)
		}
	}
	refused(fleet.StateQueued)
	key := r.place(w, r.h1.ID, "G0")
	refused(fleet.StatePulling)
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady})
	refused(fleet.StateRunning)
	r.stop(w.ID, fleet.GoalStopped)
	refused(fleet.StateStopping)
	r.gone(key, r.now)
	v, err := r.DeleteVolume(ctx, r.ana.ID, "data", r.now)
	r.ok(err)
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID}, r.now)
	r.kind(err, fleet.KindConflict)
	if !strings.Contains(err.Error(), "carrel volume restore data") {
		t.Errorf("message %q does not say what to do", err)
	}
	if got := r.workspace(w.ID); got.State != fleet.StateStopped || got.Epoch != 1 {
		t.Errorf("a refused start changed %+v", got)
	}
	_, err = r.RestoreVolume(ctx, r.ana.ID, string(v.ID), "", r.now)
	r.ok(err)
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID}, r.now)
	r.ok(err)
}

func TestVolumeHasOneLiveWriter_CONT15(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w1 := r.create(r.ana, "w1", 1, data(false))
	r.now = r.now.Add(time.Millisecond)
	w2 := r.create(r.ana, "w2", 1, data(false))
	r.now = r.now.Add(time.Millisecond)
	reader := r.create(r.ana, "w3", 1, data(true))
	key := r.ready(w1, r.h1.ID, "G0")
	waiting := r.snapshot().Waiting
	if len(waiting) != 2 || waiting[0].BusyVolume != "data (in use by w1)" || waiting[0].HomeHost != r.h1.ID || waiting[1].BusyVolume != "" {
		t.Fatalf("waiting %+v", waiting)
	}
	p := fleet.Placement{Run: fleet.RunKey{Workspace: w2.ID, Epoch: 1}, Host: r.h1.ID, Devices: []fleet.DeviceID{"G1"}}
	done, err := r.Commit(ctx, fleet.Plan{Placements: []fleet.Placement{p}}, r.now)
	r.ok(err)
	if len(done.Dropped) != 1 {
		t.Fatalf("two writers of one volume: %+v", done)
	}
	if leases := r.leases(w2.ID); len(leases) != 0 {
		t.Fatalf("a dropped placement left %+v", leases)
	}
	r.place(reader, r.h1.ID, "G2")
	r.stop(w2.ID, fleet.GoalStopped)
	if got := r.workspace(w1.ID); got.State != fleet.StateRunning {
		t.Fatalf("w1 noticed: %+v", got)
	}
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w2.ID}, r.now)
	r.ok(err)
	r.stop(w1.ID, fleet.GoalStopped)
	r.gone(key, r.now)
	if waiting := r.snapshot().Waiting; len(waiting) != 1 || waiting[0].BusyVolume != "" {
		t.Fatalf("waiting %+v", waiting)
	}
	r.place(w2, r.h1.ID, "G0")
}

func TestVolumeStaysOnItsHost(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 0)
	key := r.ready(w, r.h2.ID)
	r.stop(w.ID, fleet.GoalStopped)
	r.gone(key, r.now)
	_, err := r.QueueRun(context.Background(), fleet.StartOrder{Workspace: w.ID}, r.now)
	r.ok(err)
	p := fleet.Placement{Run: fleet.RunKey{Workspace: w.ID, Epoch: 2}, Host: r.h1.ID}
	done, err := r.Commit(context.Background(), fleet.Plan{Placements: []fleet.Placement{p}}, r.now)
	r.ok(err)
	if len(done.Placed) != 0 {
		t.Error("placed away from its home")
	}
	r.place(w, r.h2.ID)
}

func TestDeletedVolumeIsKeptSevenDays_T42(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 0)
	key := r.ready(w, r.h1.ID)
	_, _, err := r.Stop(ctx, fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalDeleted, DropHome: true}, r.now)
	r.ok(err)
	r.gone(key, r.now)
	gone := func() int {
		t.Helper()
		r.ok(r.Seen(ctx, r.h2.ID, r.now)) // time goes on
		d, err := r.Desired(ctx, r.h1.ID)
		r.ok(err)
		return len(d.VolumesGone)
	}
	r.now = r.now.Add(fleet.VolumeRetention - time.Second)
	if gone() != 0 {
		t.Fatal("a volume goes before its time")
	}
	v, err := r.RestoreVolume(ctx, r.ana.ID, "w1-home", "rescued", r.now)
	r.ok(err)
	if v.Name != "rescued" || !v.DeletedAt.IsZero() {
		t.Fatalf("restored %+v", v)
	}
	_, err = r.DeleteVolume(ctx, r.ana.ID, "rescued", r.now)
	r.ok(err)
	r.now = r.now.Add(fleet.VolumeRetention)
	expired, err := r.ExpiredVolumes(ctx, r.now)
	r.ok(err)
	if gone() != 1 || len(expired) != 1 {
		t.Fatal("a volume does not go in its time")
	}
	_, err = r.RestoreVolume(ctx, r.ana.ID, "rescued", "", r.now)
	r.kind(err, fleet.KindNotFound)
	r.observe(fleet.Observation{Host: r.h2.ID, VolumesRemoved: []fleet.VolumeID{v.ID}})
	if gone() != 1 {
		t.Fatal("another host's word removed it")
	}
	r.observe(fleet.Observation{Host: r.h1.ID, VolumesRemoved: []fleet.VolumeID{v.ID}})
	if gone() != 0 {
		t.Fatal("a removed volume is still to go")
	}
}

func TestFreshHomeRenamesTheKeptOneAway(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	first := r.create(r.ana, "w1", 0)
	r.stop(first.ID, fleet.GoalDeleted)
	order := r.order(r.ana, "w1", 0)
	order.FreshHome = true
	w, _, err := r.CreateWorkspace(ctx, order, r.now)
	r.ok(err)
	volumes, err := r.Volumes(ctx, r.ana.ID, false)
	r.ok(err)
	if len(volumes) != 2 || volumes[0].Name != "w1-home" || volumes[1].Name != "w1-home-2" || w.ReusedVol != "" {
		t.Errorf("volumes %+v", volumes)
	}
}

func TestDeclaredMountsComeFromTheSettings(t *testing.T) {
	declared := fleet.DeclaredMount{Name: "datasets", HostPath: "/nfs/datasets", ReadOnly: true, Public: true}
	r := newRoom(t, func(o *sqlite.Options) { o.Declared = []fleet.DeclaredMount{declared} })
	w := r.create(r.ana, "w1", 0, fleet.VolumeUse{Volume: "datasets", Target: "/datasets"})
	r.place(w, r.h1.ID)
	d, err := r.Desired(context.Background(), r.h1.ID)
	r.ok(err)
	m := d.Runs[0].Mounts[1]
	if m.HostPath != "/nfs/datasets" || !m.ReadOnly || !m.Public || m.Volume != "" {
		t.Errorf("mount %+v", m)
	}
	_, _, err = r.CreateWorkspace(context.Background(), r.order(r.ana, "w2", 0, data(false), fleet.VolumeUse{Volume: "x", Target: "/data"}), r.now)
	r.kind(err, fleet.KindInvalid)
}
