package sqlite_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

// chaos is a store under random orders, reports and plans, right and wrong ones.
type chaos struct {
	*room
	ids   []fleet.WorkspaceID
	runs  []fleet.RunKey // that were ever placed
	limit int
}

func (c *chaos) step(t *rapid.T) {
	ctx := context.Background()
	c.now = c.now.Add(time.Duration(rapid.Int64Range(-60_000, 600_000).Draw(t, "pass")) * time.Millisecond)
	pick := func() fleet.WorkspaceID { return rapid.SampledFrom(c.ids).Draw(t, "workspace") }
	action := rapid.SampledFrom([]string{"create", "plan", "plan", "plan", "report", "report", "report", "replay", "stop", "restart", "delete", "start", "project", "fence", "facts", "sample"}).Draw(t, "act")
	if len(c.ids) == 0 {
		action = "create"
	}
	var err error
	switch action {
	case "create":
		var w fleet.Workspace
		order := c.order(rapid.SampledFrom([]fleet.User{c.ana, c.bo}).Draw(t, "owner"), fmt.Sprintf("w%d", len(c.ids)), rapid.IntRange(0, 2).Draw(t, "gpus"))
		if w, _, err = c.CreateWorkspace(ctx, order, c.now); err == nil {
			c.ids = append(c.ids, w.ID)
		}
	case "plan":
		c.plan(t)
	case "report", "replay":
		c.tell(t, action == "replay")
	case "stop":
		_, _, err = c.Stop(ctx, fleet.StopOrder{Workspace: pick(), Goal: fleet.GoalStopped}, c.now)
	case "restart":
		_, _, err = c.Stop(ctx, fleet.StopOrder{Workspace: pick(), Goal: fleet.GoalRunning, Restart: true}, c.now)
	case "delete":
		_, _, err = c.Stop(ctx, fleet.StopOrder{Workspace: pick(), Goal: fleet.GoalDeleted, DropHome: rapid.Bool().Draw(t, "home")}, c.now)
	case "start":
		_, err = c.QueueRun(ctx, fleet.StartOrder{Workspace: pick()}, c.now)
	case "project":
		_, err = c.ChangeProject(ctx, pick(), rapid.SampledFrom([]string{"default", "vision"}).Draw(t, "project"), c.now)
	case "fence":
		_, _, err = c.Fence(ctx, c.h1.ID, "drill", c.now)
	case "facts":
		ids := rapid.SliceOfDistinct(rapid.SampledFrom([]fleet.DeviceID{"G0", "G1", "G2", "G3"}), func(d fleet.DeviceID) fleet.DeviceID { return d }).Draw(t, "devices")
		c.facts(c.h1.ID, devices(ids...))
		c.observe(fleet.Observation{Host: c.h1.ID, Complete: true})
	case "sample":
		load := rapid.IntRange(0, 2).Draw(t, "load")
		err = c.RecordSamples(ctx, c.h1.ID, []fleet.Sample{{Device: "G0", At: c.now, UtilizationPercent: &load}, {Device: "G1", At: c.now, UtilizationPercent: &load}}, 10*time.Minute, c.now)
	}
	if err != nil && fleet.KindOf(err) == fleet.KindInternal {
		t.Fatalf("%s: %v", action, err)
	}
}

// plan places what waits, somewhere that may or may not fit.
func (c *chaos) plan(t *rapid.T) {
	var plan fleet.Plan
	for _, r := range c.snapshot().Waiting {
		var ids []fleet.DeviceID
		for range r.Spec.GPU.Count {
			ids = append(ids, rapid.SampledFrom([]fleet.DeviceID{"G0", "G1", "G2", "G3"}).Draw(t, "device"))
		}
		plan.Placements = append(plan.Placements, fleet.Placement{Run: r.Run, Host: c.h1.ID, Devices: ids, CPUMillis: rapid.Int64Range(0, 20_000).Draw(t, "cpu"), MemoryMiB: 1024})
	}
	done, err := c.Commit(context.Background(), plan, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if len(done.Placed)+len(done.Dropped) != len(plan.Placements) {
		t.Fatalf("%d placements, %+v", len(plan.Placements), done)
	}
	for _, p := range done.Placed {
		c.runs = append(c.runs, p.Run)
	}
}

// tell sends a record of a run that was placed at some time.
func (c *chaos) tell(t *rapid.T, again bool) {
	if len(c.runs) == 0 {
		return
	}
	key := rapid.SampledFrom(c.runs).Draw(t, "run")
	o := fleet.ObservedRun{
		Key: key, Phase: rapid.SampledFrom([]fleet.Phase{fleet.PhasePulling, fleet.PhaseStarting, fleet.PhaseReady, fleet.PhaseGone, fleet.PhaseGone}).Draw(t, "phase"),
		StartedAt: c.now.Add(-time.Minute), EndedAt: c.now.Add(time.Duration(rapid.Int64Range(-7200, 60).Draw(t, "ended")) * time.Second),
	}
	obs := fleet.Observation{Host: c.h1.ID, Runs: []fleet.ObservedRun{o}, Complete: rapid.Bool().Draw(t, "complete")}
	if again {
		obs.Seq = max(c.seq[c.h1.ID], 1)
	}
	c.observe(obs)
	w := c.workspace(key.Workspace)
	if last := (fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch}); w.Epoch > 0 && !slices.Contains(c.runs, last) && w.State.Placed() {
		c.runs = append(c.runs, last) // a restart that kept its place
	}
}

// check holds the store against what must be so in every state.
func (c *chaos) check(t *rapid.T) {
	ctx := context.Background()
	if _, differences, err := c.CheckLedger(ctx, c.now.Add(time.Hour)); err != nil || len(differences) > 0 {
		t.Fatalf("ledger: %v %v", differences, err)
	}
	s := c.snapshot()
	if held := s.Held[c.ana.ID]; held > c.limit {
		t.Fatalf("ana holds %d of %d devices (I12)", held, c.limit)
	}
	if h := s.Hosts[0]; h.FreeCPUMillis < 0 || h.FreeMemoryMiB < 0 {
		t.Fatalf("host %+v is promised twice", h)
	}
	held := 0
	for _, id := range c.ids {
		v, err := c.View(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		w, open := v.Workspace, 0
		for _, l := range v.Leases {
			if l.ReleasedAt.IsZero() {
				open++
			}
		}
		held += open
		placed := w.State.Placed() && v.Run.GoneAt.IsZero()
		if placed != w.State.Placed() || (w.State.Placed() && (open != w.Spec.GPU.Count || v.Run.PlacedAt.IsZero())) || (!w.State.Placed() && open != 0) {
			t.Fatalf("%s is %s with %d open leases of %d, run %+v", w.Name, w.State, open, w.Spec.GPU.Count, v.Run)
		}
	}
	if total := s.Held[c.ana.ID] + s.Held[c.bo.ID]; total != held {
		t.Fatalf("%d devices held, workspaces have %d", total, held)
	}
	c.checkReports(t)
}

func (c *chaos) checkReports(t *rapid.T) {
	now := c.now.Add(time.Hour)
	var want fleet.UsageRow
	for i, by := range []string{usage.ByLease, usage.ByUser, usage.ByProject, usage.ByPool, usage.ByModel, usage.ByWorkspace, usage.ByDay} {
		report, err := c.Report(context.Background(), fleet.UsageQuery{By: by, Now: now})
		if err != nil {
			t.Fatal(err)
		}
		var sum fleet.UsageRow
		for _, r := range report.Rows {
			sum.GPUMs += r.GPUMs
			sum.ActiveMs += r.ActiveMs
			sum.IdleMs += r.IdleMs
			sum.UnknownMs += r.UnknownMs
			if r.GPUMs < 0 || r.ActiveMs < 0 || r.IdleMs < 0 || r.UnknownMs < 0 {
				t.Fatalf("by %s: negative %+v", by, r)
			}
		}
		if i == 0 {
			want = sum
		}
		if sum != want {
			t.Fatalf("by %s: %+v, by lease %+v", by, sum, want)
		}
	}
}

func TestInvariantsHoldUnderRandomOrders_I1_I7_I12(t *testing.T) {
	base := newRoom(t)
	limit := 2
	_, err := base.UpdateUser(context.Background(), "ana", func(u *fleet.User) error { u.GPULimit = &limit; return nil }, base.now)
	base.ok(err)
	base.ok(base.CreateProject(context.Background(), fleet.Project{Name: "vision"}, base.now))
	copied := t.TempDir() + "/base.db"
	base.ok(base.Backup(context.Background(), copied))
	total := 0
	rapid.Check(t, func(rt *rapid.T) {
		c := &chaos{room: base.copyOf(t, copied), limit: limit}
		defer c.Close()
		for range rapid.IntRange(5, 40).Draw(rt, "steps") {
			c.step(rt)
		}
		c.check(rt)
		total += len(c.runs)
	})
	if total == 0 {
		t.Error("nothing was ever placed")
	}
	t.Logf("%d runs were placed", total)
}
