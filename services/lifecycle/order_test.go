package lifecycle_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
)

func TestWorkspacesOfAUserAreLimited_T38(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		w.set.WorkspaceLimit = 3
		w.restart()
		first := w.create(w.ana, "w0", 0)
		var group sync.WaitGroup
		for i := range 10 { // at once: the store has the last word
			group.Go(func() {
				if _, _, err := w.lc.Create(ctx, w.order(w.ana, fmt.Sprintf("w%d", i+1), 0)); err != nil && !fleet.IsKind(err, fleet.KindExhausted) {
					t.Errorf("create: %v", err)
				}
			})
		}
		group.Wait()
		own, _, err := w.db.Workspaces(ctx, fleet.WorkspaceFilter{Owner: w.ana.ID})
		if err != nil || len(own) != 3 {
			t.Fatalf("%d workspaces of a limit of 3, %v", len(own), err)
		}
		full := func(name string) error {
			_, _, err := w.lc.Create(ctx, w.order(w.ana, name, 0, func(o *lifecycle.CreateOrder) { o.Stopped = true }))
			return err
		}
		want := "your limit is 3 workspaces and you have 3; remove one"
		if err := full("more"); !fleet.IsKind(err, fleet.KindExhausted) || !strings.Contains(err.Error(), want) {
			t.Errorf("a fourth: %v", err)
		}
		if _, err := w.lc.Plan(ctx, w.order(w.ana, "more", 0)); !fleet.IsKind(err, fleet.KindExhausted) {
			t.Errorf("plan of a fourth: %v", err)
		}
		if err := full("w0"); !fleet.IsKind(err, fleet.KindExists) {
			t.Errorf("a name that is taken: %v", err)
		}
		w.create(w.bo, "w0", 0) // everybody for themselves
		w.settle()
		if _, err := w.lc.Delete(ctx, first, "ana", false); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(first, fleet.StateDeleted)
		if err := full("more"); err != nil {
			t.Errorf("after one was removed: %v", err)
		}
	})
}

// an order whose answer was lost is given again with the same request id, and happens once.
func TestR_12_RetriedStartAndRestartHappenOnce(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		restart := lifecycle.RestartOrder{Workspace: id, By: w.ana, RequestID: "r1"}
		for range 3 { // before it happened, while it happens, and afterwards
			if _, err := w.lc.Restart(ctx, restart); err != nil {
				t.Fatal(err)
			}
			w.settle()
			if ws := w.is(id, fleet.StateRunning); ws.Epoch != 2 {
				t.Fatalf("epoch %d after one restart", ws.Epoch)
			}
		}
		var group sync.WaitGroup
		restart.RequestID = "r2"
		for range 5 {
			group.Go(func() {
				if _, err := w.lc.Restart(ctx, restart); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		w.settle()
		if ws := w.is(id, fleet.StateRunning); ws.Epoch != 3 {
			t.Errorf("epoch %d after two restarts", ws.Epoch)
		}
		w.restart() // the gateway
		if _, err := w.lc.Restart(ctx, restart); err != nil {
			t.Error(err)
		}
		w.settle()
		if ws := w.is(id, fleet.StateRunning); ws.Epoch != 3 {
			t.Errorf("epoch %d after a retry to the next gateway", ws.Epoch)
		}
		restart.UpdateImage = true
		if _, err := w.lc.Restart(ctx, restart); !fleet.IsKind(err, fleet.KindExists) {
			t.Errorf("the same id for another order: %v", err)
		}
		start := lifecycle.StartOrder{Workspace: id, By: w.ana, RequestID: "s1"}
		for _, before := range []fleet.State{fleet.StateStopped, fleet.StateRunning} {
			if before == fleet.StateStopped {
				w.stopNow(id)
			}
			if _, err := w.lc.Start(ctx, start); err != nil {
				t.Fatal(err)
			}
			w.settle()
			w.is(id, fleet.StateRunning)
		}
		w.stopNow(id)
		if _, err := w.lc.Start(ctx, start); err != nil { // a retry that was long on its way
			t.Fatal(err)
		}
		w.settle()
		w.is(id, fleet.StateStopped)
		if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id, By: w.ana, RequestID: strings.Repeat("x", 65)}); !fleet.IsKind(err, fleet.KindInvalid) {
			t.Errorf("a long request id: %v", err)
		}
	})
}

func TestRetriedRestartOfAWaitingWorkspaceDoesNotRestartItOnceItRuns(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		holder := w.create(w.bo, "holder", 1)
		w.settle()
		id := w.create(w.ana, "w1", 1)
		w.settle()
		order := lifecycle.RestartOrder{Workspace: id, By: w.ana, RequestID: "r1"}
		if ws, err := w.lc.Restart(ctx, order); err != nil || ws.State != fleet.StateQueued {
			t.Fatal(ws.State, err)
		}
		w.stopNow(holder)
		w.settle()
		w.is(id, fleet.StateRunning)
		if _, err := w.lc.Restart(ctx, order); err != nil {
			t.Fatal(err)
		}
		w.settle()
		if ws := w.is(id, fleet.StateRunning); ws.Epoch != 1 {
			t.Errorf("epoch %d", ws.Epoch)
		}
	})
}

func (w *world) stopNow(id fleet.WorkspaceID) {
	w.t.Helper()
	if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
		w.t.Fatal(err)
	}
	w.settle()
	w.is(id, fleet.StateStopped)
}

// A run that can never start fails with the cause, so that who waits for it is told. What may come back is waited for.
func TestAQueuedRunThatCanNeverStartFails(t *testing.T) {
	inWorld(t, []int{1, 1}, func(w *world) {
		// Admitted while a host has not told what it has, so that it might have been this one.
		third, err := w.db.EnsureLocalHost(ctx, "h3", "default", make([]byte, 32), w.clock.Now())
		if err != nil {
			t.Fatal(err)
		}
		a := newAgent(third.ID, "h3", 2, w.hosts.now)
		w.hosts.mu.Lock()
		w.hosts.byID[third.ID] = a
		w.hosts.mu.Unlock()
		lacks := w.create(w.ana, "lacks", 1, func(o *lifecycle.CreateOrder) { o.Spec.GPU.Models = []string{"H100"} })
		w.settle()
		w.is(lacks, fleet.StateQueued)
		w.up(a)
		w.settle()
		pass(6 * time.Second) // a tick of the loop
		ws := w.is(lacks, fleet.StateFailed)
		if want := "pool default has no GPU of model H100; it has 4090 (4)"; ws.Reason.Code != lifecycle.ReasonCannotStart || !strings.Contains(ws.Reason.Message, want) {
			t.Errorf("reason %+v", ws.Reason)
		}
		if _, ok := w.lc.QueuePlace(lacks); ok {
			t.Error("its place in the queue is still remembered")
		}
		events, err := w.db.Events(ctx, lacks, 10)
		if err != nil || !slices.ContainsFunc(events, func(e fleet.Event) bool { return e.State == fleet.StateFailed && e.Code == lifecycle.ReasonCannotStart }) {
			t.Errorf("events %+v, %v", events, err)
		}
		if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: lacks, By: w.ana}); !fleet.IsKind(err, fleet.KindInvalid) {
			t.Errorf("start of what cannot start: %v", err)
		}
		// Put right, it starts.
		if _, err := w.lc.Update(ctx, lifecycle.UpdateOrder{Workspace: lacks, Fields: []string{"gpu"}, Spec: fleet.Spec{GPU: fleet.GPURequest{Count: 1}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: lacks, By: w.ana}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(lacks, fleet.StateRunning)

		// Its only host with enough devices goes away: that is waited for.
		holder := w.create(w.bo, "holder", 2)
		w.settle()
		big := w.create(w.ana, "big", 2)
		w.settle()
		w.down(a)
		pass(6 * time.Second)
		w.is(holder, fleet.StateRunning)
		w.is(big, fleet.StateQueued)
		if wait, _ := w.lc.QueuePlace(big); !strings.Contains(wait.Why, "host h3 does not answer") {
			t.Errorf("why: %s", wait.Why)
		}
	})
}
