package lifecycle

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

func TestDecide(t *testing.T) {
	code := func(n int) *int { return &n }
	w := func(s fleet.State, g fleet.Goal) fleet.Workspace {
		out := fleet.Workspace{ID: "w1", Epoch: 3, State: s, Goal: g, Spec: fleet.Spec{GPU: fleet.GPURequest{Count: 2, Models: []string{"4090"}}}}
		out.Pending = out.Spec
		if s == fleet.StateStopping {
			out.Reason = fleet.Reason{Code: ReasonStoppedByUser, Message: "stopped by ana"}
		}
		return out
	}
	restart := w(fleet.StateStopping, fleet.GoalRunning)
	restart.Restart = true
	resized := restart
	resized.Pending.GPU.Count = 1
	moved := restart
	moved.Pending.Pool = "big"
	run := fleet.Run{Key: fleet.RunKey{Workspace: "w1", Epoch: 3}, Host: "h1", PlacedAt: noon, Devices: []fleet.DeviceID{"a", "b"}}
	dead := run
	dead.GoneAt = noon
	older := run
	older.Key.Epoch = 2
	seen := func(p fleet.Phase, change ...func(*fleet.ObservedRun)) fleet.ObservedRun {
		o := fleet.ObservedRun{Key: run.Key, Phase: p}
		if p == fleet.PhaseGone {
			o.EndedAt = noon
		}
		for _, c := range change {
			c(&o)
		}
		return o
	}
	reason := func(c string, exit *int) func(*fleet.ObservedRun) {
		return func(o *fleet.ObservedRun) { o.Reason = fleet.Reason{Code: c, ExitCode: exit} }
	}
	old := func(o *fleet.ObservedRun) { o.Key.Epoch = 2 }
	pulls := fleet.StateStarting // a placed run is starting; that it pulls shows where the table has the step
	if pulls.CanBecome(fleet.StatePulling) {
		pulls = fleet.StatePulling
	}
	running, stopped, deleted := fleet.GoalRunning, fleet.GoalStopped, fleet.GoalDeleted

	for _, c := range []struct {
		name    string
		w       fleet.Workspace
		run     fleet.Run
		o       fleet.ObservedRun
		state   fleet.State
		reason  string
		effects string // of release, requeue, keep, delete
	}{
		{"pulls", w(fleet.StateStarting, running), run, seen(fleet.PhasePulling), pulls, "", ""},
		{"pulls on", w(fleet.StatePulling, running), run, seen(fleet.PhasePulling), fleet.StatePulling, "", ""},
		{"starts", w(fleet.StatePulling, running), run, seen(fleet.PhaseStarting), fleet.StateStarting, "", ""},
		{"is ready", w(fleet.StateStarting, running), run, seen(fleet.PhaseReady), fleet.StateRunning, "", ""},
		{"is ready at once", w(fleet.StatePulling, running), run, seen(fleet.PhaseReady), fleet.StateRunning, "", ""},
		{"a running one never goes back", w(fleet.StateRunning, running), run, seen(fleet.PhaseStarting), fleet.StateRunning, "", ""},
		{"an end that nobody asked for counts once it is gone", w(fleet.StateRunning, running), run, seen(fleet.PhaseStopping), fleet.StateRunning, "", ""},
		{"stopping stays so when it becomes ready", w(fleet.StateStopping, stopped), run, seen(fleet.PhaseReady), fleet.StateStopping, "", ""},
		{"stopping stays so while it pulls", w(fleet.StateStopping, stopped), run, seen(fleet.PhasePulling), fleet.StateStopping, "", ""},
		{"stops", w(fleet.StateStopping, stopped), run, seen(fleet.PhaseGone, reason("stopped", code(143))), fleet.StateStopped, ReasonStoppedByUser, "release"},
		{"is deleted", w(fleet.StateStopping, deleted), run, seen(fleet.PhaseGone), fleet.StateDeleted, "", "release delete"},
		{"restarts with its devices", restart, run, seen(fleet.PhaseGone), fleet.StateQueued, "", "release requeue keep"},
		{"restarts with fewer devices from the queue", resized, run, seen(fleet.PhaseGone), fleet.StateQueued, "", "release requeue"},
		{"restarts in another pool from the queue", moved, run, seen(fleet.PhaseGone), fleet.StateQueued, "", "release requeue"},
		{"started again while stopping", w(fleet.StateStopping, running), run, seen(fleet.PhaseGone), fleet.StateQueued, "", "release requeue"},
		{"REL-02 exits by itself", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("exited", code(3))), fleet.StateFailed, ReasonExited, "release"},
		{"exits with 0 unasked", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("exited", code(0))), fleet.StateFailed, ReasonExited, "release"},
		{"gone without a word", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone), fleet.StateFailed, ReasonExited, "release"},
		{"REL-02 killed from outside", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("exited", code(137))), fleet.StateStopped, ReasonKilledOutside, "release"},
		{"out of memory", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("exited", code(137)), func(o *fleet.ObservedRun) { o.OutOfMemory = true }), fleet.StateFailed, ReasonOutOfMemory, "release"},
		{"REL-05 removed from outside", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("removed_outside", nil)), fleet.StateStopped, ReasonRemovedOutside, "release"},
		{"R-19 host rebooted", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, reason("host_rebooted", nil)), fleet.StateStopped, ReasonHostRebooted, "release"},
		{"image missing", w(fleet.StatePulling, running), run, seen(fleet.PhaseGone, reason("image_not_found", nil)), fleet.StateFailed, "image_not_found", "release"},
		{"refused by the host", w(fleet.StateStarting, running), run, seen(fleet.PhaseGone, reason("refused", nil)), fleet.StateFailed, "refused", "release"},
		{"REL-19 late report of a stopped run", w(fleet.StateStopped, stopped), dead, seen(fleet.PhaseReady), fleet.StateStopped, "", ""},
		{"ACCT-14 second end", w(fleet.StateStopped, stopped), dead, seen(fleet.PhaseGone), fleet.StateStopped, "", ""},
		{"REL-19 report of the run before", w(fleet.StateRunning, running), older, seen(fleet.PhaseReady, old), fleet.StateRunning, "", ""},
		{"a run before, seen gone after a fence", w(fleet.StateRunning, running), older, seen(fleet.PhaseGone, old), fleet.StateRunning, "", "release"},
		{"report of a later epoch", w(fleet.StateRunning, running), run, seen(fleet.PhaseGone, func(o *fleet.ObservedRun) { o.Key.Epoch = 4 }), fleet.StateRunning, "", ""},
		{"a queued run is nobody's to report", w(fleet.StateQueued, running), fleet.Run{Key: run.Key}, seen(fleet.PhaseReady), fleet.StateQueued, "", ""},
		{"deleted stays deleted", w(fleet.StateDeleted, deleted), dead, seen(fleet.PhaseReady), fleet.StateDeleted, "", ""},
		{"a phase that is not known", w(fleet.StateStarting, running), run, seen(""), fleet.StateStarting, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			step := decide(c.w, c.run, c.o)
			if step.State != c.state || step.Reason.Code != c.reason {
				t.Errorf("became %s (%s), want %s (%s)", step.State, step.Reason.Code, c.state, c.reason)
			}
			if step.State == fleet.StateFailed && c.reason == ReasonExited && step.Reason.Message == "" {
				t.Error("failed without a sentence")
			}
			if got := effects(step); got != c.effects {
				t.Errorf("effects %q, want %q", got, c.effects)
			}
		})
	}
}

// agentReasons is what becomes of a workspace whose run is gone without its owner's wish, for each of the agent's reason codes.
var agentReasons = map[string]struct {
	state fleet.State
	code  string
}{
	"stopped":             {fleet.StateStopped, ReasonKilledOutside}, // an order of another gateway, such as the one before an older copy came back
	"exited":              {fleet.StateFailed, ReasonExited},
	"killed_outside":      {fleet.StateStopped, ReasonKilledOutside},
	"out_of_memory":       {fleet.StateFailed, ReasonOutOfMemory},
	"out_of_memory_one":   {fleet.StateFailed, "out_of_memory_one"}, // it and the last three tell of a run that goes on; gone with one, it failed
	"removed_outside":     {fleet.StateStopped, ReasonRemovedOutside},
	"restarted_outside":   {fleet.StateStopped, ReasonRestarted},
	"host_rebooted":       {fleet.StateStopped, ReasonHostRebooted},
	"refused":             {fleet.StateFailed, "refused"},
	"image_not_found":     {fleet.StateFailed, "image_not_found"},
	"pull_failed":         {fleet.StateFailed, "pull_failed"},
	"disk_full":           {fleet.StateFailed, "disk_full"},
	"name_taken":          {fleet.StateFailed, "name_taken"},
	"volume_missing":      {fleet.StateFailed, "volume_missing"},
	"start_failed":        {fleet.StateFailed, "start_failed"},
	"gpu_runtime_missing": {fleet.StateFailed, "gpu_runtime_missing"},
	"not_ready":           {fleet.StateFailed, "not_ready"},
	"conflict":            {fleet.StateFailed, "conflict"},
	"device_busy":         {fleet.StateFailed, "device_busy"},
	"host_fault":          {fleet.StateFailed, "host_fault"},
}

func TestDecideKnowsEveryReasonOfAnAgent(t *testing.T) {
	source, err := os.ReadFile("../../agent/host/run.go") // the two meet only on the wire, where the codes are words
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^\tReason\w+ += "([a-z_]+)"`).FindAllSubmatch(source, -1)
	if len(declared) != len(agentReasons) {
		t.Errorf("the agent has %d reasons, the table %d", len(declared), len(agentReasons))
	}
	for _, d := range declared {
		if _, ok := agentReasons[string(d[1])]; !ok {
			t.Errorf("the agent gives reason %s, of which nothing is decided", d[1])
		}
	}
	run := fleet.Run{Key: fleet.RunKey{Workspace: "w", Epoch: 1}, PlacedAt: noon}
	asked := fleet.Reason{Code: ReasonStoppedByUser, Message: "stopped by ana"}
	for code, want := range agentReasons {
		o := fleet.ObservedRun{Key: run.Key, Phase: fleet.PhaseGone, EndedAt: noon, Reason: fleet.Reason{Code: code, Message: "the agent's sentence"}}
		for _, state := range []fleet.State{fleet.StatePulling, fleet.StateStarting, fleet.StateRunning} {
			step := decide(fleet.Workspace{ID: "w", Epoch: 1, State: state, Goal: fleet.GoalRunning}, run, o)
			if step.State != want.state || step.Reason.Code != want.code || step.Reason.Message == "" || !step.Release {
				t.Errorf("%s while %s: %s (%s, %q), want %s (%s)", code, state, step.State, step.Reason.Code, step.Reason.Message, want.state, want.code)
			}
		}
		step := decide(fleet.Workspace{ID: "w", Epoch: 1, State: fleet.StateStopping, Goal: fleet.GoalStopped, Reason: asked}, run, o)
		if step.State != fleet.StateStopped || step.Reason.Code != ReasonStoppedByUser {
			t.Errorf("%s after its owner stopped it: %s (%s)", code, step.State, step.Reason.Code)
		}
		o.Phase = fleet.PhaseReady // a passing reason of a run that goes on
		if step := decide(fleet.Workspace{ID: "w", Epoch: 1, State: fleet.StateRunning, Goal: fleet.GoalRunning}, run, o); step.State != fleet.StateRunning || step.Release {
			t.Errorf("%s while it goes on: %s", code, step.State)
		}
	}
}

func effects(s fleet.Step) string {
	var out []string
	for _, e := range []struct {
		is   bool
		name string
	}{{s.Release, "release"}, {s.Requeue, "requeue"}, {s.Keep, "keep"}, {s.Delete, "delete"}} {
		if e.is {
			out = append(out, e.name)
		}
	}
	return strings.Join(out, " ")
}

// Every combination: the table of lives is kept, nothing comes back to life, and only "gone" releases.
func TestDecideKeepsTheTransitionTable(t *testing.T) {
	phases := []fleet.Phase{fleet.PhasePulling, fleet.PhaseStarting, fleet.PhaseReady, fleet.PhaseStopping, fleet.PhaseGone, ""}
	for _, state := range fleet.States() {
		for _, goal := range []fleet.Goal{fleet.GoalRunning, fleet.GoalStopped, fleet.GoalDeleted} {
			if state.Placed() && state != fleet.StateStopping && goal != fleet.GoalRunning {
				continue // every order that takes the goal away makes it stopping
			}
			for _, phase := range phases {
				for epoch := range int64(3) {
					for _, restart := range []bool{false, true} {
						w := fleet.Workspace{ID: "w", Epoch: 2, State: state, Goal: goal, Restart: restart}
						run := fleet.Run{Key: fleet.RunKey{Workspace: "w", Epoch: epoch + 1}, PlacedAt: noon}
						if state == fleet.StateQueued && run.Key.Epoch == 2 {
							run.PlacedAt = time.Time{}
						}
						step := decide(w, run, fleet.ObservedRun{Key: run.Key, Phase: phase})
						if !state.CanBecome(step.State) {
							t.Errorf("%s, goal %s, epoch %d: %s leads to %s", state, goal, epoch+1, phase, step.State)
						}
						if !state.Live() && step.State != state {
							t.Errorf("REL-19: %s came back as %s", state, step.State)
						}
						if run.Key.Epoch != 2 && step.State != state {
							t.Errorf("REL-19: another epoch moved %s to %s", state, step.State)
						}
						if step.Release && phase != fleet.PhaseGone {
							t.Errorf("I4: %s releases", phase)
						}
						if step.Requeue && goal != fleet.GoalRunning {
							t.Errorf("goal %s requeued", goal)
						}
					}
				}
			}
		}
	}
}
