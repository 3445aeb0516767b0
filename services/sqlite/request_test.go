package sqlite_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestNamedOrdersHappenOnce_R12(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	id := fleet.OrderID{Actor: r.ana.ID, ID: "r1", Fingerprint: "restart"}
	order := fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalRunning, Restart: true, Order: id}
	if _, found, err := r.Ordered(ctx, id, r.now); found || err != nil {
		t.Fatalf("known before it was given: %v", err)
	}
	first, changes, err := r.Stop(ctx, order, r.now)
	r.ok(err)
	if first.State != fleet.StateStopping || len(changes.Hosts) != 1 {
		t.Fatalf("%+v %+v", first, changes)
	}
	r.gone(key, r.now)
	if got := r.workspace(w.ID); got.State != fleet.StatePulling || got.Epoch != 2 {
		t.Fatalf("%+v", got)
	}
	again, changes, err := r.Stop(ctx, order, r.now)
	r.ok(err)
	if again.State != fleet.StatePulling || again.Epoch != 2 || len(changes.Hosts)+len(changes.Workspaces) != 0 {
		t.Errorf("a retry: %+v %+v", again, changes)
	}
	known, found, err := r.Ordered(ctx, id, r.now)
	r.ok(err)
	if !found || known.ID != w.ID {
		t.Errorf("found %v: %+v", found, known)
	}
	other := id
	other.Fingerprint = "start"
	_, _, err = r.Ordered(ctx, other, r.now)
	r.kind(err, fleet.KindExists)
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID, Order: other}, r.now)
	r.kind(err, fleet.KindExists)
	other.Actor = r.bo.ID // another's orders have names of their own
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID, Order: other}, r.now)
	r.ok(err)
	later := r.now.Add(25 * time.Hour)
	if _, found, err := r.Ordered(ctx, id, later); found || err != nil {
		t.Errorf("remembered for more than 24 h: %v, %v", found, err)
	}
	got, _, err := r.Stop(ctx, order, later)
	r.ok(err)
	if got.State != fleet.StateStopping {
		t.Errorf("a new order after 24 h: %+v", got)
	}
}

func TestAFailedOrderIsNotRemembered(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 0)
	_, _, err := r.Stop(ctx, fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalDeleted}, r.now)
	r.ok(err)
	id := fleet.OrderID{Actor: r.ana.ID, ID: "s1", Fingerprint: "start"}
	_, err = r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID, Order: id}, r.now)
	r.kind(err, fleet.KindNotFound)
	if _, found, err := r.Ordered(ctx, id, r.now); found || err != nil {
		t.Errorf("remembered: %v, %v", found, err)
	}
}

func TestARefusedRunFailsOnlyWhileItWaits(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	w := r.create(r.ana, "w1", 1)
	refuse := func(epoch int64) (fleet.Workspace, fleet.Changes) {
		order := fleet.StopOrder{Workspace: w.ID, Goal: fleet.GoalStopped, Refused: epoch, Reason: fleet.Reason{Code: "cannot_start", Message: "no such model"}}
		got, changes, err := r.Stop(ctx, order, r.now)
		r.ok(err)
		return got, changes
	}
	if got, changes := refuse(2); got.State != fleet.StateQueued || len(changes.Workspaces) != 0 {
		t.Errorf("another run: %+v", got)
	}
	if got, _ := refuse(1); got.State != fleet.StateFailed || got.Goal != fleet.GoalStopped || got.Reason.Message != "no such model" {
		t.Errorf("%+v", got)
	}
	_, err := r.QueueRun(ctx, fleet.StartOrder{Workspace: w.ID}, r.now)
	r.ok(err)
	r.place(r.workspace(w.ID), r.h1.ID, "G0")
	if got, _ := refuse(2); got.State != fleet.StatePulling || got.Goal != fleet.GoalRunning {
		t.Errorf("a run that was placed meanwhile: %+v", got)
	}
	r.stop(w.ID, fleet.GoalDeleted)
	r.gone(fleet.RunKey{Workspace: w.ID, Epoch: 2}, r.now)
	if got, _ := refuse(2); got.State != fleet.StateDeleted {
		t.Errorf("a deleted one: %+v", got)
	}
}

func TestWorkspacesOfAnOwnerAreCountedInTheirTransaction_T38(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	var made atomic.Int32
	var group sync.WaitGroup
	for i := range 12 {
		group.Go(func() {
			order := r.order(r.ana, fmt.Sprintf("w%d", i), 0)
			order.MostOfOwner = 4
			_, _, err := r.CreateWorkspace(ctx, order, r.now)
			switch {
			case err == nil:
				made.Add(1)
			case !fleet.IsKind(err, fleet.KindExhausted):
				t.Error(err)
			}
		})
	}
	group.Wait()
	if made.Load() != 4 {
		t.Errorf("%d workspaces were made with a limit of 4", made.Load())
	}
	if volumes, err := r.Volumes(ctx, r.ana.ID, true); err != nil || len(volumes) != 4 {
		t.Errorf("%d volumes, %v", len(volumes), err)
	}
}
