package lifecycle

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Reason codes that the gateway gives by itself; others come from agents.
const (
	ReasonStoppedByUser   = "stopped_by_user"
	ReasonDeletedByUser   = "deleted_by_user"
	ReasonRestartedByUser = "restarted_by_user"
	ReasonExited          = "exited"
	ReasonOutOfMemory     = "out_of_memory"
	ReasonKilledOutside   = "killed_outside"
	ReasonRemovedOutside  = "removed_outside"
	ReasonRestarted       = "restarted_outside"
	ReasonHostRebooted    = "host_rebooted"
	ReasonStopped         = "stopped"
	ReasonCannotStart     = "cannot_start"
)

// sigkilled is the exit status of a first process that was killed with signal 9. Nothing inside a container can send that to its
// first process (pid_namespaces(7)), so without an out-of-memory kill it came from outside.
const sigkilled = 128 + 9

// decide is the one rule of what an observation makes of a workspace:
//
//   - A record of an earlier run, or of a run that was seen to be gone, changes no state: nothing comes back to life without a new start.
//   - While the goal is running, phases lead forward: pulling, starting, running. Once stopping, only "gone" leads on.
//   - Gone releases the devices. The workspace is then deleted, queued again (restart, or a start while it was stopping), or stopped, as
//     its owner wanted. When nobody asked for the end: stopped if it came from outside (killed, removed, restarted, host rebooted), failed if it
//     came from the run itself (its first process exited, whatever the status; out of memory; image; refused by the host).
func decide(w fleet.Workspace, run fleet.Run, o fleet.ObservedRun) fleet.Step {
	same := fleet.Step{State: w.State}
	if o.Key != run.Key || !run.GoneAt.IsZero() {
		return same
	}
	if o.Key.Epoch != w.Epoch || !w.State.Placed() {
		if o.Phase == fleet.PhaseGone && !run.PlacedAt.IsZero() { // its container may have outlived a fence
			same.Run, same.Release, same.EndedAt = o, true, o.EndedAt
		}
		return same
	}
	step := fleet.Step{State: w.State, Sudo: o.Sudo, Run: o}
	if o.Phase == fleet.PhaseGone {
		return gone(step, w, run, o)
	}
	if w.State == fleet.StateStopping {
		return step
	}
	if next, ok := phaseStates[o.Phase]; ok && w.State != fleet.StateRunning && w.State.CanBecome(next) {
		step.State = next
	}
	return step
}

// phaseStates is what a live phase makes of a workspace that is to run. An end that nobody asked for counts only once it is gone.
var phaseStates = map[fleet.Phase]fleet.State{
	fleet.PhasePulling:  fleet.StatePulling,
	fleet.PhaseStarting: fleet.StateStarting,
	fleet.PhaseReady:    fleet.StateRunning,
}

func gone(step fleet.Step, w fleet.Workspace, run fleet.Run, o fleet.ObservedRun) fleet.Step {
	step.Release, step.EndedAt = true, o.EndedAt
	switch {
	case w.Goal == fleet.GoalDeleted:
		step.State, step.Delete = fleet.StateDeleted, true
	case w.Goal == fleet.GoalRunning && w.State == fleet.StateStopping:
		step.State, step.Requeue, step.Keep = fleet.StateQueued, true, w.Restart && keepsDevices(w, run)
	case w.State == fleet.StateStopping:
		step.State, step.Reason = fleet.StateStopped, w.Reason
		step.Reason.ExitCode = o.Reason.ExitCode
	default:
		step.State, step.Reason = unasked(o)
	}
	return step
}

// keepsDevices reports whether the devices of the ended run are what the next one asks for.
func keepsDevices(w fleet.Workspace, run fleet.Run) bool {
	have, want := w.Spec.GPU, w.Pending.GPU
	return want.Count == len(run.Devices) && w.Pending.Pool == w.Spec.Pool &&
		(w.Pending.ImageHost == "" || w.Pending.ImageHost == run.Host) &&
		(len(want.Models) == 0 || slices.Equal(want.Models, have.Models))
}

// unasked says what an end is that nobody asked for.
func unasked(o fleet.ObservedRun) (fleet.State, fleet.Reason) {
	r := o.Reason
	switch {
	case o.OutOfMemory || r.Code == ReasonOutOfMemory:
		r.Code = ReasonOutOfMemory
		r.Message = cmp.Or(r.Message, "it ran out of memory and was ended; start it with more (`--memory`), or use less")
		return fleet.StateFailed, r
	case r.Code == ReasonRemovedOutside:
		r.Message = cmp.Or(r.Message, "its container was removed from outside Carrel; start it again, its volumes are kept")
		return fleet.StateStopped, r
	case r.Code == ReasonRestarted:
		r.Message = cmp.Or(r.Message, "its container was restarted from outside Carrel, which ended what ran in it; start it again, its volumes are kept")
		return fleet.StateStopped, r
	case r.Code == ReasonHostRebooted:
		r.Message = cmp.Or(r.Message, "its host rebooted; start it again, its volumes are kept")
		return fleet.StateStopped, r
	case r.Code == ReasonStopped, r.Code == ReasonKilledOutside, r.Code == ReasonExited && r.ExitCode != nil && *r.ExitCode == sigkilled:
		r.Code = ReasonKilledOutside
		r.Message = "its container was stopped from outside Carrel; start it again, its volumes are kept"
		return fleet.StateStopped, r
	case r.Code == "" || r.Code == ReasonExited:
		r.Code = ReasonExited
		if r.Message == "" {
			r.Message = "its first process ended by itself"
			if r.ExitCode != nil {
				r.Message = fmt.Sprintf("its first process ended by itself with status %d; `carrel logs` has its last lines", *r.ExitCode)
			}
		}
	}
	return fleet.StateFailed, r
}
