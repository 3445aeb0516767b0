package command

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const barWidth = 24 // characters

// waitFor says what is waited for: that workspace runs, in a run after afterEpoch.
type waitFor struct {
	workspace  *carrelv1.Workspace // as the call that started it returned it
	afterEpoch int64
	quiet      bool
}

// waitReady waits until a workspace is ready, showing what goes on. What ends it without that is an error which says
// why, what its container wrote last, and what to do.
func (a *app) waitReady(ctx context.Context, api *api, o waitFor) (*carrelv1.Workspace, error) {
	p := output.NewProgress(a.sys.Err, a.sys.ErrTerminal, a.sys.Width)
	last := o.workspace
	seen := func(w *carrelv1.Workspace) (bool, error) {
		if w.GetVersion() < last.GetVersion() {
			return false, nil // older than what the call returned
		}
		last = w
		done, err := a.judge(w, o.afterEpoch)
		if !done && !o.quiet {
			p.Show(a.progressText(w))
		}
		return done, err
	}
	done, err := seen(o.workspace)
	if !done && err == nil {
		err = api.watch(ctx, &carrelv1.WatchRequest{Workspace: last.GetId()}, watchEvents{
			State: seen,
			Settled: func() error { // also at each keep-alive: the time that it waits goes on
				if !o.quiet {
					p.Show(a.progressText(last))
				}
				return nil
			},
			Lost: func(text string) { p.Say("carrel: " + text) }, Patient: true,
		})
	}
	p.Done()
	if hasCode(err, exitInterrupted) {
		return last, failf(exitInterrupted, "%s", a.leftAs(last))
	}
	var f *failedWorkspace
	if errors.As(err, &f) {
		return last, a.explain(f.w)
	}
	return last, err
}

// failedWorkspace ends the waiting for a workspace that will not get ready.
type failedWorkspace struct{ w *carrelv1.Workspace }

func (f *failedWorkspace) Error() string { return f.w.GetName() + " is " + word(f.w.GetState()) }

func (a *app) judge(w *carrelv1.Workspace, afterEpoch int64) (done bool, err error) {
	switch w.GetState() {
	case carrelv1.WorkspaceState_WORKSPACE_STATE_RUNNING:
		return w.GetRun().GetEpoch() > afterEpoch || afterEpoch == 0, nil
	case carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED, carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED, carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED:
		return true, &failedWorkspace{w}
	default:
		return false, nil
	}
}

// progressText is the line to show, and a key that changes when a new line is worth it.
func (a *app) progressText(w *carrelv1.Workspace) (key, text string) {
	state := word(w.GetState())
	if since := w.GetHostUnreachableSince(); since != nil {
		return "unreachable", fmt.Sprintf("%s: host %s does not answer since %s", state, w.GetRun().GetHost(), output.Stamp(since.AsTime()))
	}
	switch w.GetState() {
	case carrelv1.WorkspaceState_WORKSPACE_STATE_QUEUED:
		return queueText(a, w.GetQueue())
	case carrelv1.WorkspaceState_WORKSPACE_STATE_PULLING:
		return pullText(w)
	case carrelv1.WorkspaceState_WORKSPACE_STATE_STARTING:
		return state, "starting on " + orDash(w.GetRun().GetHost())
	default:
		return state, state
	}
}

func queueText(a *app, q *carrelv1.QueuePlace) (key, text string) {
	if q == nil {
		return "queued", "queued"
	}
	waited := ""
	if s := q.GetSince(); s != nil {
		waited = ", " + output.Age(a.sys.Now().Sub(s.AsTime()))
	}
	key = fmt.Sprintf("queued: place %d of %d: %s", q.GetPlace(), q.GetLength(), q.GetWhy())
	if q.GetPlace() == 0 {
		key = "queued: " + q.GetWhy()
	}
	return key, strings.TrimSuffix(key, ": ") + waited
}

func pullText(w *carrelv1.Workspace) (key, text string) {
	pull := w.GetPull()
	phase := pull.GetPhase()
	if phase == "" {
		phase = "pulling"
	}
	key = phase + " " + w.GetSpec().GetImage()
	if pull.GetBytesTotal() <= 0 {
		return key, key + " on " + orDash(w.GetRun().GetHost())
	}
	done, total := min(pull.GetBytesDone(), pull.GetBytesTotal()), pull.GetBytesTotal()
	return key, fmt.Sprintf("%s %s %3d%% %s of %s", key, output.Bar(done, total, barWidth), done*100/total, output.Bytes(done), output.Bytes(total))
}

// leftAs says in which state Ctrl-C left the workspace.
func (a *app) leftAs(w *carrelv1.Workspace) string {
	name := w.GetName()
	switch w.GetState() {
	case carrelv1.WorkspaceState_WORKSPACE_STATE_QUEUED:
		return fmt.Sprintf("stopped waiting; %s stays queued and starts by itself. Cancel: carrel stop %s; wait again: carrel up %s", name, name, name)
	case carrelv1.WorkspaceState_WORKSPACE_STATE_PULLING, carrelv1.WorkspaceState_WORKSPACE_STATE_STARTING:
		return fmt.Sprintf("stopped waiting; %s is %s and goes on by itself. Cancel: carrel stop %s; wait again: carrel up %s", name, word(w.GetState()), name, name)
	default:
		return fmt.Sprintf("stopped waiting; %s is %s", name, word(w.GetState()))
	}
}

// explain prints why a workspace did not get ready, and what its container wrote last.
func (a *app) explain(w *carrelv1.Workspace) error {
	r := w.GetReason()
	if lines := r.GetLogTail(); len(lines) > 0 {
		a.say("last lines of %s:", w.GetName())
		for _, l := range lines {
			a.say("  | %s", l)
		}
	}
	text := fmt.Sprintf("%s is %s", w.GetName(), word(w.GetState()))
	if r.GetMessage() != "" {
		text += ": " + strings.TrimSuffix(r.GetMessage(), ".")
	}
	if r.ExitCode != nil {
		text += fmt.Sprintf(" (exit status %d)", r.GetExitCode())
	}
	switch w.GetState() {
	case carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED:
		text += fmt.Sprintf("; `carrel logs %s` has all of it, `carrel up %s` tries again", w.GetName(), w.GetName())
	case carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED:
		text += fmt.Sprintf("; `carrel start %s` starts it again", w.GetName())
	default: // no order brings it back, or it needs none
	}
	return failf(exitFailure, "%s", text)
}
