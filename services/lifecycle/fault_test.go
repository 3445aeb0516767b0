package lifecycle_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/lifecycle"
)

// REL-07, R-1: the gateway dies before and after each write and each dispatch of a workspace's life; the next one goes on from there.
func TestREL_07_TheGatewayDiesAtEachStep(t *testing.T) {
	for _, before := range []bool{true, false} {
		for at := 1; ; at++ {
			hit := ""
			t.Run(fmt.Sprintf("%d before=%v", at, before), func(t *testing.T) {
				inWorld(t, []int{2}, func(w *world) { hit = dieAt(w, at, before) })
			})
			if hit == "" { // the life is over before this point
				if at < 12 {
					t.Errorf("a life has only %d steps", at-1)
				}
				break
			}
		}
	}
}

// dieAt leads a workspace through create, restart, stop, start and delete, with a death of the gateway on the way; what its owner asked
// for and got no answer to is asked for again.
func dieAt(w *world, at int, before bool) (hit string) {
	point := &failPoint{at: at, before: before}
	w.crash()
	w.failAt = point
	w.newClock(time.Now())
	w.start()
	w.up(w.host(0))
	insist := func(order func() error) {
		w.t.Helper()
		err := order()
		w.settle()
		point.mu.Lock()
		died := point.hit != "" && w.failAt != nil
		point.mu.Unlock()
		if died {
			w.failAt = nil
			w.restart()
			if err != nil {
				err = order()
			}
			w.settle()
		}
		if err != nil {
			w.t.Fatalf("after death at %q: %v", point.hit, err)
		}
	}
	create := w.order(w.ana, "w1", 1, func(o *lifecycle.CreateOrder) { o.RequestID = "r1" })
	var id fleet.WorkspaceID
	insist(func() error { ws, _, err := w.lc.Create(ctx, create); id = ws.ID; return err })
	w.is(id, fleet.StateRunning)
	insist(func() error {
		_, err := w.lc.Restart(ctx, lifecycle.RestartOrder{Workspace: id, By: w.ana})
		return err
	})
	w.is(id, fleet.StateRunning)
	insist(func() error { _, err := w.lc.Stop(ctx, id, "ana", 0); return err })
	w.is(id, fleet.StateStopped)
	insist(func() error { _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); return err })
	w.is(id, fleet.StateRunning)
	insist(func() error { _, err := w.lc.Delete(ctx, id, "ana", false); return err })
	w.is(id, fleet.StateDeleted)

	all, _, err := w.db.Workspaces(ctx, fleet.WorkspaceFilter{IncludeDeleted: true})
	if err != nil || len(all) != 1 {
		w.t.Errorf("I9: %d workspaces of one request: %v", len(all), err)
	}
	for _, l := range w.leases(id) {
		if l.ReleasedAt.IsZero() || l.EndedAt.Before(l.StartedAt) || l.EndedAt.After(l.ReleasedAt) {
			w.t.Errorf("lease %+v", l)
		}
	}
	if live := w.host(0).live(); len(live) > 0 {
		w.t.Errorf("containers left: %v", live)
	}
	return point.hit
}

// REL-21, I18: a lost link ends nothing; the host takes work again when it is back.
func TestREL_21_ALostLinkEndsNothing(t *testing.T) {
	inWorld(t, []int{1, 1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		h1 := w.host(0)
		if run, err := w.db.Run(ctx, fleet.RunKey{Workspace: id, Epoch: 1}); err != nil || run.Host != h1.id {
			t.Fatalf("on %s, %v", run.Host, err)
		}
		w.down(h1)
		lost := w.clock.Now()
		pass(time.Hour)
		synctest.Wait()
		w.is(id, fleet.StateRunning)
		if since := w.lc.UnreachableSince(h1.id); since.IsZero() || since.After(lost) {
			t.Errorf("unreachable since %v, lost at %v", since, lost)
		}
		if leases := w.leases(id); len(leases) != 1 || !leases[0].EndedAt.IsZero() {
			t.Errorf("leases %+v", leases)
		}
		w.create(w.ana, "w2", 1) // fills h2
		third := w.create(w.ana, "w3", 1)
		w.settle()
		w.is(third, fleet.StateQueued)
		wait, _ := w.lc.QueuePlace(third)
		if want := "host h1 does not answer since 2000-01-01 "; !strings.Contains(wait.Why, want) {
			t.Errorf("why %q has no %q", wait.Why, want)
		}
		if live := h1.live(); len(live) != 1 {
			t.Errorf("containers %v", live)
		}
		w.up(h1)
		w.settle()
		if since := w.lc.UnreachableSince(h1.id); !since.IsZero() {
			t.Errorf("still unreachable since %v", since)
		}
		w.is(id, fleet.StateRunning)
		w.is(third, fleet.StateQueued)
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(third, fleet.StateRunning)
	})
}

// orders that were given while the host was away reach it when it is back, and its devices are nobody else's before that.
func TestR_10_OrdersWaitForTheHost(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		other := w.create(w.bo, "w2", 1)
		w.settle()
		w.down(w.host(0))
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Minute)
		w.is(id, fleet.StateStopping)
		if leases := w.leases(id); !leases[0].ReleasedAt.IsZero() {
			t.Errorf("released without a word of the host: %+v", leases[0])
		}
		w.up(w.host(0))
		pass(4 * time.Second)
		w.is(id, fleet.StateStopped)
		w.is(other, fleet.StateRunning)
	})
}

// REL-02, ACCT-05: what ended while the gateway was away ends when its host says it did.
func TestREL_02_EndsWhileTheGatewayWasAway(t *testing.T) {
	inWorld(t, []int{4}, func(w *world) {
		var ids []fleet.WorkspaceID
		for i := range 4 {
			ids = append(ids, w.create(w.ana, fmt.Sprintf("w%d", i+1), 1))
		}
		w.settle()
		w.crash()
		ended := w.clock.Now()
		exit := func(n int) *int { return &n }
		for i, r := range []fleet.Reason{{Code: "exited", ExitCode: exit(137)}, {Code: "exited", ExitCode: exit(3)}, {Code: "removed_outside"}} {
			w.host(0).end(fleet.RunKey{Workspace: ids[i], Epoch: 1}, r)
		}
		pass(40 * time.Minute)
		w.newClock(time.Now())
		w.start()
		w.up(w.host(0))
		w.settle()
		w.is(ids[0], fleet.StateStopped)
		if ws := w.is(ids[1], fleet.StateFailed); ws.Reason.ExitCode == nil || *ws.Reason.ExitCode != 3 {
			t.Errorf("reason %+v", ws.Reason)
		}
		w.is(ids[2], fleet.StateStopped)
		w.is(ids[3], fleet.StateRunning)
		for i, id := range ids {
			leases := w.leases(id)
			switch {
			case len(leases) != 1:
				t.Errorf("%d leases", len(leases))
			case i == 3 && !leases[0].EndedAt.IsZero():
				t.Error("the one that runs was ended")
			case i < 3 && !leases[0].EndedAt.Equal(ended):
				t.Errorf("lease %d ended at %v, its container at %v", i, leases[0].EndedAt, ended)
			}
		}
	})
}

// ACCT-13, REL-19: messages that come twice, late or out of order change nothing.
func TestACCT_13_ReplaysAndLateReports(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		h, err := w.db.Host(ctx, "h1")
		if err != nil {
			t.Fatal(err)
		}
		a := w.host(0)
		ready, _, _ := a.batch(0, false)
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		w.settle()
		stopped := w.is(id, fleet.StateStopped)
		gone, _, _ := a.batch(0, false)
		lease := w.leases(id)[0]
		replay := func(o fleet.Observation, seq, session int64) {
			t.Helper()
			o.Seq, o.Session = seq, session
			if err := w.lc.Observe(ctx, o); err != nil {
				t.Error(err)
			}
		}
		for _, seq := range []int64{1, 2, h.AfterSeq, 1000} {
			replay(ready, seq, h.Session)   // a report from before the stop
			replay(ready, seq, h.Session-1) // and one of an earlier session
			pass(time.Minute)
			replay(gone, seq+1000, h.Session) // a second end
		}
		second := gone
		second.Runs[0].EndedAt = w.clock.Now() // ACCT-14: a later time of the same end
		replay(second, 5000, h.Session)
		if ws := w.get(id); ws.State != fleet.StateStopped || ws.Reason.Code != stopped.Reason.Code {
			t.Errorf("became %s (%+v)", ws.State, ws.Reason)
		}
		if leases := w.leases(id); len(leases) != 1 || !leases[0].EndedAt.Equal(lease.EndedAt) || !leases[0].ReleasedAt.Equal(lease.ReleasedAt) {
			t.Errorf("lease moved: %+v, was %+v", leases, lease)
		}
		if run, ok := w.lc.Pull(id); ok {
			t.Errorf("pull %+v", run)
		}
	})
}

// the wall clock is set back an hour while the gateway restarts; nothing is lost, doubled or negative.
func TestR_18_TheWallClockSetBack(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		pass(10 * time.Minute)
		last := w.clock.Now()
		w.crash()
		w.newClock(time.Now().Add(-time.Hour))
		if now := w.clock.Now(); now.Before(last.Add(-5 * time.Minute)) {
			t.Errorf("gateway time went back to %v, the last commit was about %v", now, last)
		}
		w.start()
		w.up(w.host(0))
		w.settle()
		w.is(id, fleet.StateRunning)
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(id, fleet.StateStopped)
		leases := w.leases(id)
		if len(leases) != 1 {
			t.Fatalf("%d leases", len(leases))
		}
		l := leases[0]
		if length := l.EndedAt.Sub(l.StartedAt); length < 9*time.Minute || length > 11*time.Minute || l.ReleasedAt.Before(l.EndedAt) {
			t.Errorf("lease of %v: %+v", length, l)
		}
		if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(id, fleet.StateRunning)
		if leases := w.leases(id); len(leases) != 2 || leases[0].StartedAt.Before(l.EndedAt) {
			t.Errorf("leases %+v", leases)
		}
	})
}

// A host that takes calls and answers none holds nobody up, counts as unreachable after a while, and is used again when it answers.
func TestREL_14_AHangingHostHoldsNobodyUp(t *testing.T) {
	inWorld(t, []int{1, 1}, func(w *world) {
		w.create(w.ana, "w1", 1)
		w.settle()
		h1 := w.host(0)
		h1.set(func(a *agent) { a.hung = true })
		pass(time.Minute)
		synctest.Wait()
		if since := w.lc.UnreachableSince(h1.id); since.IsZero() {
			t.Error("a host that says nothing counts as connected")
		}
		id := w.create(w.bo, "w2", 1)
		w.settle()
		w.is(id, fleet.StateRunning)
		h1.set(func(a *agent) { a.hung = false })
		pass(20 * time.Second)
		synctest.Wait()
		if since := w.lc.UnreachableSince(h1.id); !since.IsZero() {
			t.Errorf("it answers, and counts as unreachable since %v", since)
		}
	})
}

// REL-11: a newer link takes the place of an older one, whose loss is then nobody's.
func TestREL_11_TheNewestLinkWins(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		h := w.host(0)
		old, err := w.db.Host(ctx, "h1")
		if err != nil {
			t.Fatal(err)
		}
		w.up(h)
		w.settle()
		w.lc.HostDown(h.id, old.Session)
		w.settle()
		id := w.create(w.ana, "w1", 1)
		w.settle()
		w.is(id, fleet.StateRunning)
	})
}

// A host that lost its journal counts from one again, and everything is asked for anew.
func TestANewJournalIsReadFromItsBeginning(t *testing.T) {
	inWorld(t, []int{2}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		for i := range 5 { // so that the old numbers are higher than the new ones
			other := w.create(w.bo, fmt.Sprintf("o%d", i), 0)
			w.settle()
			if _, err := w.lc.Delete(ctx, other, "bo", false); err != nil {
				t.Fatal(err)
			}
			w.settle()
		}
		h := w.host(0)
		w.down(h)
		h.set(func(a *agent) {
			a.journal, a.seq = "j2", 0
			for key := range a.records {
				delete(a.records, key)
			}
		})
		h.end(fleet.RunKey{Workspace: id, Epoch: 1}, fleet.Reason{Code: "exited"}) // number 1 of the new journal
		w.up(h)
		w.settle()
		w.is(id, fleet.StateFailed)
	})
}

// The store cannot be written for a while: what could not be committed is asked for again, and nothing is acknowledged before.
func TestREL_17_NothingIsAcknowledgedBeforeTheCommit(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		w.crash()
		full := &fullDisk{Store: w.db}
		w.newClock(time.Now())
		clock := w.clock
		w.lc = lifecycle.New(lifecycle.Deps{Store: full, Reader: w.db, Hosts: w.hosts, Events: w.events, Keys: keys{}, Now: clock.Now, Log: quiet, Settings: w.set})
		w.run()
		w.up(w.host(0))
		w.settle()
		full.set(true)
		w.host(0).end(fleet.RunKey{Workspace: id, Epoch: 1}, fleet.Reason{Code: "exited"})
		pass(time.Minute)
		w.is(id, fleet.StateRunning)
		a := w.host(0)
		a.mu.Lock()
		acked, seq := a.acked, a.seq
		a.mu.Unlock()
		if acked >= seq {
			t.Errorf("acknowledged %d of %d, which could not be committed", acked, seq)
		}
		full.set(false)
		pass(15 * time.Second)
		w.is(id, fleet.StateFailed)
	})
}

func TestFenceFreesDevicesOnlyOfASilentHost(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		h := w.host(0)
		if _, err := w.lc.Fence(ctx, h.id, "burnt"); !fleet.IsKind(err, fleet.KindConflict) {
			t.Errorf("fenced a host that answers: %v", err)
		}
		w.down(h)
		n, err := w.lc.Fence(ctx, h.id, "burnt")
		if err != nil || n != 1 {
			t.Fatalf("%d, %v", n, err)
		}
		if ws := w.get(id); ws.State.Live() {
			t.Errorf("still %s", ws.State)
		}
		w.up(h) // it was not burnt: its container must go before the host takes work
		pass(15 * time.Second)
		synctest.Wait()
		if live := h.live(); len(live) != 0 {
			t.Errorf("containers %v", live)
		}
		if ws := w.get(id); ws.State.Live() {
			t.Errorf("REL-19: came back as %s", ws.State)
		}
		again := w.create(w.bo, "w2", 1)
		pass(15 * time.Second)
		w.is(again, fleet.StateRunning)
	})
}

// CONT-14, D14: a home ties its workspace to a host, and the queue says so.
func TestTheHomesHostIsWaitedFor(t *testing.T) {
	inWorld(t, []int{1, 1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.settle()
		if _, err := w.lc.Stop(ctx, id, "ana", 0); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.create(w.bo, "holder", 1)
		w.settle()
		if _, err := w.lc.Start(ctx, lifecycle.StartOrder{Workspace: id}); err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.is(id, fleet.StateQueued)
		wait, _ := w.lc.QueuePlace(id)
		if want := "your home is on h1: the one GPU of host h1 is in use: bo 1"; wait.Why != want {
			t.Errorf("why %q, want %q", wait.Why, want)
		}
	})
}

// Device keys reach exactly the hosts of the user's runs.
func TestKeysReachTheHostsOfTheUsersRuns(t *testing.T) {
	inWorld(t, []int{1, 1}, func(w *world) {
		id := w.create(w.ana, "w1", 1)
		w.create(w.bo, "w1", 1)
		w.settle()
		h1, h2 := w.host(0), w.host(1)
		count := func(a *agent) int { a.mu.Lock(); defer a.mu.Unlock(); return a.applies }
		one, two := count(h1), count(h2)
		_, err := w.db.AddDeviceKey(ctx, fleet.DeviceKey{User: w.ana.ID, PublicKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFakeFakeFakeFakeFakeFakeFakeFakeFakeFakeFak1", Fingerprint: "SHA256:x", Label: "laptop", CreatedAt: w.clock.Now()})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.lc.KeysChanged(ctx, w.ana.ID); err != nil {
			t.Fatal(err)
		}
		w.settle()
		if count(h1) != one+1 || count(h2) != two {
			t.Errorf("applied %d and %d times", count(h1)-one, count(h2)-two)
		}
		h1.mu.Lock()
		defer h1.mu.Unlock()
		if h1.keys[fleet.RunKey{Workspace: id, Epoch: 1}] != 1 {
			t.Errorf("keys %v", h1.keys)
		}
	})
}

func TestImagePolicy(t *testing.T) {
	inWorld(t, []int{1}, func(w *world) {
		w.host(0).set(func(a *agent) {
			a.images["ghcr.io/lab/torch:1"] = fleet.ResolvedImage{Digest: "sha256:t1", RequireCUDA: "cuda>=12.0"}
			a.images["mine"] = fleet.ResolvedImage{Digest: "sha256:m1", Present: true, LocalOnly: true}
		})
		if _, err := w.db.PutImage(ctx, fleet.Image{Name: "torch", Reference: "ghcr.io/lab/torch:1", Digest: "sha256:pinned", Default: true}, w.clock.Now()); err != nil {
			t.Fatal(err)
		}
		image := func(name string) lifecycle.CreateOrder {
			return w.order(w.ana, "w1", 0, func(o *lifecycle.CreateOrder) { o.Spec.Image = name })
		}
		for _, c := range []struct {
			policy lifecycle.ImagePolicy
			image  string
			digest string
			want   string // of the refusal
			kind   fleet.Kind
		}{
			{lifecycle.ImagesCatalogue, "torch", "sha256:pinned", "", 0},
			{lifecycle.ImagesCatalogue, "", "sha256:pinned", "", 0},
			{lifecycle.ImagesCatalogue, "debian", "", "there is no image debian in the catalogue; it has torch", fleet.KindInvalid},
			{lifecycle.ImagesRegistries, "ghcr.io/lab/torch:1", "sha256:t1", "", 0},
			{lifecycle.ImagesRegistries, "ghcr.io/laboratory/x", "", "a registry that is not allowed here; allowed are ghcr.io/lab", fleet.KindForbidden},
			{lifecycle.ImagesRegistries, "debian", "", "not allowed here", fleet.KindForbidden},
			{lifecycle.ImagesAny, "debian", "sha256:d1", "", 0},
			{lifecycle.ImagesAny, "mine", "sha256:m1", "", 0},
			{lifecycle.ImagesAny, "nowhere", "", "image nowhere was not found", fleet.KindNotFound},
		} {
			w.set.Images, w.set.Registries = c.policy, []string{"ghcr.io/lab"}
			w.restart()
			p, err := w.lc.Plan(ctx, image(c.image))
			switch {
			case c.want == "" && (err != nil || p.Workspace.Spec.ImageDigest != c.digest):
				t.Errorf("%s %q: %s, %v", c.policy, c.image, p.Workspace.Spec.ImageDigest, err)
			case c.want != "" && (!fleet.IsKind(err, c.kind) || !strings.Contains(err.Error(), c.want)):
				t.Errorf("%s %q: %v, want %s", c.policy, c.image, err, c.want)
			}
			if c.image == "mine" && err == nil && p.Workspace.Spec.ImageHost != w.host(0).id {
				t.Errorf("mine is only on h1, not %q", p.Workspace.Spec.ImageHost)
			}
		}
		w.down(w.host(0))
		if _, err := w.lc.Plan(ctx, image("debian")); !fleet.IsKind(err, fleet.KindUnavailable) {
			t.Errorf("without hosts: %v", err)
		}
	})
}
