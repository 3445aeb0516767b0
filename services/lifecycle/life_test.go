package lifecycle_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
)

var ctx = context.Background()

// With four devices a fifth one-GPU workspace waits with place and reason, and starts by itself within 2 s of another's end.
func TestAFifthWorkspaceStartsWhenAnotherStops(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		var ids []fleet.WorkspaceID
		for i := range 4 {
			ids = append(ids, w.create(w.ana, fmt.Sprintf("w%d", i+1), 1))
		}
		w.settle()
		fifth := w.create(w.bo, "fifth", 1)
		cpu := w.create(w.bo, "cpu", 0)
		w.settle()
		for _, id := range append(ids, cpu) {
			w.is(id, fleet.StateRunning)
		}
		w.is(fifth, fleet.StateQueued)
		wait, ok := w.lc.QueuePlace(fifth)
		if want := "all 4 GPUs of pool default are in use: ana 4"; !ok || wait.Place != 1 || wait.Length != 1 || wait.Why != want {
			t.Errorf("place %+v", wait)
		}
		if _, err := w.lc.Stop(ctx, ids[1], "ana", 0); err != nil {
			t.Fatal(err)
		}
		pass(2 * time.Second) // half a second of it is the container's own end
		w.is(ids[1], fleet.StateStopped)
		w.is(fifth, fleet.StateRunning)
		if _, ok := w.lc.QueuePlace(fifth); ok {
			t.Error("its place in the queue is still remembered")
		}
		if _, err := w.lc.Stop(ctx, ids[1], "ana", 0); err != nil {
			t.Errorf("REL-05: stopping a stopped one: %v", err)
		}
	})
}

func TestSCHED_07_StopAtEveryMoment(t *testing.T) {
	for _, after := range []time.Duration{0, 50 * time.Millisecond, 900 * time.Millisecond, 1100 * time.Millisecond, 1250 * time.Millisecond, 3 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			inWorld(t, []int{1}, func(w *world) {
				w.host(0).set(func(a *agent) { a.pullTime = time.Second })
				id := w.create(w.ana, "w1", 1)
				pass(after)
				if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
					t.Fatal(err)
				}
				w.settle()
				if ws := w.is(id, fleet.StateStopped); ws.Reason.Code != lifecycle.ReasonStoppedByUser {
					t.Errorf("reason %+v", ws.Reason)
				}
				if live := w.host(0).live(); len(live) != 0 {
					t.Errorf("containers left: %v", live)
				}
				if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); err != nil {
					t.Fatal(err)
				}
				pass(4 * time.Second)
				w.is(id, fleet.StateRunning)
			})
		})
	}
}

func TestPullProgressIsShownAndDropped(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		w.host(0).set(func(a *agent) { a.pullTime = 5 * time.Second })
		id := w.create(w.ana, "w1", 1)
		w.settle()
		if p, ok := w.lc.Pull(id); !ok || p != (fleet.Pull{Done: 10, Total: 100}) {
			t.Errorf("pull %+v, %v", p, ok)
		}
		pass(5 * time.Second)
		w.is(id, fleet.StateRunning)
		if _, ok := w.lc.Pull(id); ok {
			t.Error("pull progress is still remembered")
		}
	})
}

func TestACCT_18_DeleteInEachState(t *testing.T) {
	for state, prepare := range map[fleet.State]func(w *world) fleet.WorkspaceID{
		fleet.StateQueued: func(w *world) fleet.WorkspaceID {
			w.create(w.bo, "holder", 1)
			w.settle()
			return w.create(w.ana, "w1", 1)
		},
		fleet.StateStarting: func(w *world) fleet.WorkspaceID {
			w.host(0).set(func(a *agent) { a.startTime = time.Minute })
			return w.create(w.ana, "w1", 1)
		},
		fleet.StateRunning: func(w *world) fleet.WorkspaceID { return w.create(w.ana, "w1", 1) },
		fleet.StateStopping: func(w *world) fleet.WorkspaceID {
			id := w.create(w.ana, "w1", 1)
			w.settle()
			w.host(0).set(func(a *agent) { a.stopTime = 4 * time.Second })
			_, _ = w.lc.Stop(ctx, id, "ana", 0)
			return id
		},
		fleet.StateStopped: func(w *world) fleet.WorkspaceID {
			return w.create(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Stopped = true })
		},
		fleet.StateFailed: func(w *world) fleet.WorkspaceID {
			id := w.create(w.ana, "w1", 1)
			w.settle()
			w.host(0).end(fleet.RunKey{Workspace: id, Epoch: 1}, fleet.Reason{Code: "exited"})
			return id
		},
	} {
		t.Run(string(state), func(t *testing.T) {
			inWorld(t, []int{1}, func(w *world) {
				id := prepare(w)
				w.settle()
				w.is(id, state)
				if _, err := w.lc.Delete(ctx, id, "ana", false); err != nil {
					t.Fatal(err)
				}
				pass(5 * time.Second)
				w.is(id, fleet.StateDeleted)
				if _, err := w.lc.Delete(ctx, id, "ana", false); err != nil {
					t.Errorf("again: %v", err)
				}
				if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); !fleet.IsKind(err, fleet.KindNotFound) {
					t.Errorf("start: %v", err)
				}
				for _, l := range w.leases(id) {
					if l.ReleasedAt.IsZero() || l.EndedAt.IsZero() {
						t.Errorf("lease left open: %+v", l)
					}
				}
				if live := w.host(0).live(); slices.ContainsFunc(live, func(k fleet.RunKey) bool { return k.Workspace == id }) {
					t.Error("container left")
				}
				w.host(0).set(func(a *agent) { a.startTime = 0 })
				again := w.create(w.ana, "w1", 0)
				w.settle()
				if ws := w.is(again, fleet.StateRunning); ws.ReusedVol != "w1-home" {
					t.Errorf("the kept home was not taken again: %q", ws.ReusedVol)
				}
			})
		})
	}
}

func TestRestartKeepsItsDevicesWhileOthersWait(t *testing.T) {
	inWorld(t, []int{2}, func(w *world) {
		id := w.create(w.ana, "w1", 2)
		w.settle()
		waiting := w.create(w.bo, "other", 1)
		w.settle()
		before, err := w.db.Run(ctx, fleet.RunKey{Workspace: id, Epoch: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.lc.Restart(ctx, lifecycle.RestartOrder{Workspace: id, By: w.ana}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		ws := w.is(id, fleet.StateRunning)
		w.is(waiting, fleet.StateQueued)
		run, err := w.db.Run(ctx, fleet.RunKey{Workspace: id, Epoch: 2})
		if err != nil || ws.Epoch != 2 || !slices.Equal(run.Devices, before.Devices) {
			t.Errorf("epoch %d, devices %v, before %v, %v", ws.Epoch, run.Devices, before.Devices, err)
		}
		// Fewer devices: back through the queue, behind who waits.
		if _, err := w.lc.Update(ctx, lifecycle.UpdateOrder{Workspace: id, Fields: []string{"gpu"}, Spec: fleet.Spec{GPU: fleet.GPURequest{Count: 1}}}); err != nil {
			t.Fatal(err)
		}
		ws = w.is(id, fleet.StateRunning)
		if got := lifecycle.Pending(&ws); !slices.Equal(got, []string{"gpu"}) {
			t.Errorf("pending %v", got)
		}
		if _, err := w.lc.Restart(ctx, lifecycle.RestartOrder{Workspace: id, By: w.ana}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(id, fleet.StateRunning)
		w.is(waiting, fleet.StateRunning)
	})
}

func TestSCHED_09_LimitAtEveryStart(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		two := 2
		w.set.GPULimit = &two
		ana, err := w.db.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &two; return nil }, w.clock.Now())
		if err != nil {
			t.Fatal(err)
		}
		stopped := func(o *lifecycle.CreateOrder) { o.Stopped = true }
		w1, w2, w3 := w.create(ana, "w1", 1, stopped), w.create(ana, "w2", 1, stopped), w.create(ana, "w3", 1, stopped)
		for _, id := range []fleet.WorkspaceID{w1, w2} {
			if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); err != nil {
				t.Fatal(err)
			}
		}
		w.settle()
		_, err = w.lc.Start(ctx, lifecycle.StartOrder{Workspace: w3})
		if want := "your limit is 2 GPUs at once, 2 are taken by w1 (1), w2 (1), and this one needs 1"; !fleet.IsKind(err, fleet.KindExhausted) || !strings.Contains(err.Error(), want) {
			t.Errorf("third start: %v", err)
		}
		_, err = w.lc.Update(ctx, lifecycle.UpdateOrder{Workspace: w1, Fields: []string{"gpu"}, Spec: fleet.Spec{GPU: fleet.GPURequest{Count: 2}}})
		if !fleet.IsKind(err, fleet.KindExhausted) {
			t.Errorf("resize: %v", err)
		}
		one := 1
		if _, err = w.db.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &one; return nil }, w.clock.Now()); err != nil {
			t.Fatal(err)
		}
		w.lc.Replan()
		w.settle()
		w.is(w1, fleet.StateRunning) // a lowered limit ends nothing
		w.is(w2, fleet.StateRunning)
		if _, err := w.lc.Restart(ctx, lifecycle.RestartOrder{Workspace: w1, By: w.ana}); err != nil {
			t.Errorf("restart as it is: %v", err)
		}
		w.settle()
		w.is(w1, fleet.StateRunning)
	})
}

// SCHED-08: what is stopped counts no more, and what is stopping holds nobody up longer than it takes.
func TestSCHED_08_StoppingGivesTheLimitBack(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		one := 1
		ana, err := w.db.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &one; return nil }, w.clock.Now())
		if err != nil {
			t.Fatal(err)
		}
		w1 := w.create(ana, "w1", 1)
		w.settle()
		if _, err := w.lc.Stop(ctx, w1, "ana", 0); err != nil {
			t.Fatal(err)
		}
		w2 := w.create(ana, "w2", 1) // w1 is still stopping
		w.settle()
		w.is(w1, fleet.StateStopped)
		w.is(w2, fleet.StateRunning)
	})
}

func TestSCHED_10_FailedRunsCountNothing(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		one := 1
		ana, _ := w.db.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &one; return nil }, w.clock.Now())
		for i := range 3 {
			id := w.create(ana, fmt.Sprintf("w%d", i), 1)
			w.settle()
			exit := 1
			w.host(0).end(fleet.RunKey{Workspace: id, Epoch: 1}, fleet.Reason{Code: "exited", ExitCode: &exit})
			w.settle()
			if ws := w.is(id, fleet.StateFailed); ws.Reason.ExitCode == nil || *ws.Reason.ExitCode != 1 {
				t.Errorf("reason %+v", ws.Reason)
			}
		}
		good := w.create(ana, "good", 1)
		w.settle()
		w.is(good, fleet.StateRunning)
	})
}

// SCHED-01: starts that arrive together never share a device, and a limit holds among them.
func TestSCHED_01_ParallelStarts(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		one := 1
		ana, _ := w.db.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.GPULimit = &one; return nil }, w.clock.Now())
		done := make(chan error, 20)
		for i := range 20 {
			user := w.bo
			if i%2 == 0 {
				user = ana
			}
			go func() {
				_, _, err := w.lc.Create(ctx, w.order(user, fmt.Sprintf("w%d", i), 1))
				if fleet.IsKind(err, fleet.KindExhausted) {
					err = nil // the limit is used up already
				}
				done <- err
			}()
		}
		for range 20 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		w.settle()
		all, _, err := w.db.Workspaces(ctx, fleet.WorkspaceFilter{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		running := map[fleet.UserID]int{}
		for _, ws := range all {
			if ws.State == fleet.StateRunning {
				running[ws.Owner]++
			}
		}
		if running[ana.ID] > 1 || running[ana.ID]+running[w.bo.ID] != 4 { // ana has none where four of bo's came first
			t.Errorf("ana runs %d, bo %d", running[ana.ID], running[w.bo.ID])
		}
	})
}

func TestCLI_11_ImpossibleOrdersAreRefusedAtOnce(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		for name, c := range map[string]struct {
			order lifecycle.CreateOrder
			kind  fleet.Kind
			want  string
		}{
			"too many":  {w.order(w.ana, "w1", 5), fleet.KindExhausted, "the largest possible is 4"},
			"absurd":    {w.order(w.ana, "w1", 1_000_000), fleet.KindInvalid, "choose 0 to 1024"},
			"negative":  {w.order(w.ana, "w1", -1), fleet.KindInvalid, "choose 0 to 1024"},
			"model":     {w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.GPU.Models = []string{"9090"} }), fleet.KindInvalid, "no GPU of model 9090; it has 4090 (4)"},
			"memory":    {w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.MemoryMiB = 1 << 20 }), fleet.KindExhausted, "the largest possible is"},
			"pool":      {w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.Pool = "nope" }), fleet.KindNotFound, "there is no pool nope; there are default"},
			"image":     {w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.Image = "debiann" }), fleet.KindNotFound, "image debiann was not found"},
			"no image":  {w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.Image = "" }), fleet.KindInvalid, "no image is named"},
			"name":      {w.order(w.ana, "W.1", 1), fleet.KindInvalid, "workspace name"},
			"dashes":    {w.order(w.ana, "a--b", 1), fleet.KindInvalid, "two dashes"},
			"long name": {w.order(w.ana, strings.Repeat("a", 300), 1), fleet.KindInvalid, "at most 22"},
		} {
			_, _, err := w.lc.Create(ctx, c.order)
			if !fleet.IsKind(err, c.kind) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s:\n got %v (%v)\nwant %s (%v)", name, err, fleet.KindOf(err), c.want, c.kind)
			}
		}
		all, _, err := w.db.Workspaces(ctx, fleet.WorkspaceFilter{IncludeDeleted: true})
		if err != nil || len(all) != 0 {
			t.Errorf("left behind: %v, %v", all, err)
		}
		volumes, err := w.db.Volumes(ctx, w.ana.ID, true)
		if err != nil || len(volumes) != 0 {
			t.Errorf("left behind: %v, %v", volumes, err)
		}
		id := w.create(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.GPU.Models = []string{"4090"} })
		w.settle()
		w.is(id, fleet.StateRunning)
	})
}

func TestTheDeploymentsImageIsTheLastDefault(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		w.set.DefaultImage = "debian"
		w.restart()
		id := w.create(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.Spec.Image = "" })
		if got := w.get(id); got.Spec.Image != "debian" || got.Spec.ImageDigest == "" || got.Origins["image"] != "default" {
			t.Errorf("image %q, digest %q, from %q", got.Spec.Image, got.Spec.ImageDigest, got.Origins["image"])
		}
	})
}

func TestR_12_RetriesGetTheFirstAnswer(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		order := w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.RequestID = "r1" })
		first, replay, err := w.lc.Create(ctx, order)
		if err != nil || replay {
			t.Fatal(err, replay)
		}
		w.settle()
		again, replay, err := w.lc.Create(ctx, order)
		if err != nil || !replay || again.ID != first.ID {
			t.Errorf("retry: %v, %v, %v", again.ID, replay, err)
		}
		other := order
		other.Spec.GPU.Count = 0
		if _, _, err := w.lc.Create(ctx, other); !fleet.IsKind(err, fleet.KindExists) {
			t.Errorf("other content: %v", err)
		}
		order.RequestID = "r2"
		if _, _, err := w.lc.Create(ctx, order); !fleet.IsKind(err, fleet.KindExists) {
			t.Errorf("same name: %v", err)
		}
		if live := w.host(0).live(); len(live) != 1 {
			t.Errorf("containers %v", live)
		}
	})
}

func TestPlanChangesNothing(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		p, err := w.lc.Plan(ctx, w.order(w.ana, "w1", 1))
		if err != nil || !p.StartsNow || p.Host != "h1" || p.Workspace.Spec.MemoryMiB == 0 || p.Workspace.Origins["memory_mib"] == "" || p.Workspace.Spec.ImageDigest != "sha256:d1" {
			t.Errorf("%+v, %v", p, err)
		}
		w.create(w.bo, "holder", 1)
		w.settle()
		p, err = w.lc.Plan(ctx, w.order(w.ana, "w1", 1))
		if err != nil || p.StartsNow || p.Why != "the one GPU of pool default is in use: bo 1" {
			t.Errorf("%+v, %v", p, err)
		}
		all, _, _ := w.db.Workspaces(ctx, fleet.WorkspaceFilter{Owner: w.ana.ID})
		if len(all) != 0 {
			t.Errorf("made %v", all)
		}
	})
}

func TestWatchersHearOfQueueAndState(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		sub := w.events.Subscribe(event.Filter{Topic: event.Workspaces, Owner: w.ana.ID})
		defer sub.Close()
		id := w.create(w.ana, "w1", 1)
		w.settle()
		if ids, _ := sub.Take(); !slices.Equal(ids, []string{string(id)}) {
			t.Errorf("heard %v", ids)
		}
		w.create(w.bo, "w1", 1)
		w.settle()
		if ids, all := sub.Take(); len(ids) > 0 || all {
			t.Errorf("heard of another's: %v, %v", ids, all)
		}
	})
}

// A host that has served a newer database takes no orders of a restored one: it is named, nothing is placed there, and it takes work again
// once the database was recovered.
func TestAHostThatRefusesOrdersGetsNoWork(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		w.is(id, fleet.StateRunning)
		w.host(0).set(func(a *agent) { a.stamp.DatabaseGeneration += 5 })
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		pass(4 * time.Second)
		if trouble := w.lc.Trouble(w.host(0).id); trouble == "" {
			t.Error("nobody is told that the host takes no orders")
		}
		second := w.create(w.ana, "w2", 1)
		pass(4 * time.Second)
		w.is(second, fleet.StateQueued)
		if wait, ok := w.lc.QueuePlace(second); !ok || !strings.Contains(wait.Why, "takes no orders") {
			t.Errorf("the queue says %+v", wait)
		}
		w.host(0).set(func(a *agent) { a.stamp.DatabaseGeneration -= 5 })
		pass(30 * time.Second)
		if trouble := w.lc.Trouble(w.host(0).id); trouble != "" {
			t.Errorf("still told: %s", trouble)
		}
		w.is(second, fleet.StateRunning)
	})
}
