package command

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type upOptions struct {
	specFlags
	name      string
	project   string
	freshHome bool
	noWait    bool
	update    bool
	recreate  bool
	yes       bool
	quiet     bool
	format    string
}

func newUp(a *app) *cobra.Command {
	o := upOptions{}
	cmd := &cobra.Command{
		Use:   "up NAME",
		Short: "Make a workspace and wait until it is ready, or start one that you have",
		Long: `Makes a workspace and waits until ssh is answered. On a name that you have already it starts that workspace; options that
differ from what it has are listed, and taken with --update (at its next start) or --recreate (at once, ending what runs).

Ctrl-C ends the waiting, not the workspace: a queued one stays queued and starts by itself, and carrel says how to cancel
that. A second Ctrl-C ends carrel at once.`,
		Example: `  carrel up fraud
  carrel up fraud --gpu 4090 --image torch2.6-cuda12.6
  carrel up big --gpu 'A100-80GB|H100:2' --memory 200G --volume data:/data:ro
  carrel up notes --gpu none`,
		Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.name = args[0]
			return a.up(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	o.register(cmd)
	a.formatFlag(cmd, &o.format)
	cmd.Flags().StringVar(&o.project, "project", "", "project `NAME` that is billed")
	cmd.Flags().BoolVar(&o.freshHome, "fresh-home", false, "begin with an empty home although one is kept (it stays, renamed)")
	cmd.Flags().BoolVarP(&o.noWait, "no-wait", "d", false, "return as soon as it is queued")
	cmd.Flags().BoolVar(&o.update, "update", false, "on a workspace that exists: take the options at its next start")
	cmd.Flags().BoolVar(&o.recreate, "recreate", false, "on a workspace that exists: take the options now, which restarts it")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "no plan and no progress")
	return cmd
}

func (a *app) up(ctx context.Context, o upOptions) error {
	if f, err := a.format(o.format); err != nil || (f == output.CSV && o.format != "") {
		return firstError(err, usagef("-o csv is for lists; use table or json here"))
	}
	if o.update && o.recreate {
		return usagef("--update and --recreate exclude each other")
	}
	change, err := o.parse() // what was asked for on this command line
	if err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	has, err := api.exactWorkspace(ctx, o.name)
	if err != nil {
		return err
	}
	if has != nil {
		return a.upExisting(ctx, api, o, change, has)
	}
	return a.upNew(ctx, api, o)
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// exactWorkspace returns the caller's workspace of exactly this name, nil where there is none. Get takes prefixes too.
func (c *api) exactWorkspace(ctx context.Context, name string) (*carrelv1.Workspace, error) {
	resp, err := c.workspaces.Get(ctx, connect.NewRequest(&carrelv1.GetRequest{Workspace: name}))
	switch {
	case hasCode(err, exitNotFound, exitUsage): // none, or a prefix of several, or no name at all: Create says what is wrong
		return nil, nil
	case err != nil:
		return nil, err
	case resp.Msg.GetWorkspace().GetName() != name:
		return nil, nil
	default:
		return resp.Msg.GetWorkspace(), nil
	}
}

// upNew makes a workspace.
func (a *app) upNew(ctx context.Context, api *api, o upOptions) error {
	change, err := func() (specChange, error) {
		flags := o.withDefaults(a.settings.Up)
		return flags.parse()
	}()
	if err != nil {
		return err
	}
	if o.project == "" {
		o.project = a.settings.Project
	}
	if !o.quiet {
		if err := a.showPlan(ctx, api, o, change.spec); err != nil {
			return err
		}
	}
	// Not ended by Ctrl-C: whether it was made must be known.
	resp, err := api.workspaces.Create(context.WithoutCancel(ctx), connect.NewRequest(&carrelv1.CreateRequest{
		RequestId: requestID(), Name: o.name, Spec: change.spec, Project: o.project, FreshHome: o.freshHome,
	}))
	if err != nil {
		return err
	}
	w := resp.Msg.GetWorkspace()
	if home := w.GetReusedHome(); home != "" {
		a.say("takes the kept volume %s again", home)
	}
	return a.finishUp(ctx, api, o, w, 0)
}

// showPlan prints what the workspace will get, and where each value came from.
func (a *app) showPlan(ctx context.Context, api *api, o upOptions, spec *carrelv1.WorkspaceSpec) error {
	resp, err := api.workspaces.Plan(ctx, connect.NewRequest(&carrelv1.PlanRequest{Name: o.name, Spec: spec, Project: o.project}))
	if err != nil {
		return err
	}
	w := resp.Msg.GetWorkspace()
	v := viewWorkspace(w)
	from := func(fields ...string) string {
		for _, f := range fields {
			if text := v.Origins[f]; text != "" {
				return text
			}
		}
		return ""
	}
	type row struct{ what, value, from string }
	rows := []row{
		{"gpus", gpuText(v.GPUs, v.GPUModels), from("gpu")},
		{"pool", v.Pool, from("pool")},
		{"image", v.Image, from("image")},
		{"cpus", cpuText(v.CPUMillis), from("cpu_millis")},
		{"memory", sizeOrDash(v.MemoryMiB), from("memory_mib")},
		{"shm", sizeOrDash(v.SHMMiB), from("shm_mib")},
		{"processes", countOrDash(v.PIDsLimit), from("pids_limit")},
		{"project", v.Project, from("project")},
	}
	if len(v.Env) > 0 {
		rows = append(rows, row{"env", envText(v.Env), from("env")})
	}
	for _, m := range v.Mounts {
		rows = append(rows, row{"volume", m.text(), from("volumes")})
	}
	start := "at once on " + resp.Msg.GetHost()
	if !resp.Msg.GetStartsNow() {
		start = "waits: " + resp.Msg.GetWhyNot()
	}
	rows = append(rows, row{"start", start, ""})
	list := output.List[row]{Columns: []output.Column[row]{
		{Title: "GETS", Text: func(r row) string { return r.what }},
		{Title: "VALUE", Text: func(r row) string { return r.value }},
		{Title: "FROM", Text: func(r row) string { return r.from }},
	}}
	return list.Write(a.sys.Err, rows, output.Options{Format: output.Table})
}

func (m mountView) text() string {
	text := m.Name + ":" + m.Target
	if m.ReadOnly {
		text += ":ro"
	}
	if m.Home {
		text += " (home)"
	}
	return text
}

func sizeOrDash(mib int64) string {
	if mib == 0 {
		return "-"
	}
	return output.MiB(mib)
}

func countOrDash(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// upExisting starts a workspace that exists, after a look at whether the options are what it has.
func (a *app) upExisting(ctx context.Context, api *api, o upOptions, change specChange, has *carrelv1.Workspace) error {
	if o.freshHome {
		return failf(exitConflict, "%s exists and has its home; --fresh-home is for a new one: `carrel rm %s` first, which keeps the old home as a volume", o.name, o.name)
	}
	if o.project != "" && o.project != has.GetProject() {
		return failf(exitConflict, "%s is billed to project %s; a workspace keeps its project: choose another name", o.name, has.GetProject())
	}
	o.merge(&change, has.GetSpec())
	diffs := change.differences(has.GetSpec())
	if len(diffs) > 0 && !o.update && !o.recreate {
		texts := make([]string, len(diffs))
		for i, d := range diffs {
			texts[i] = fmt.Sprintf("%s is %s, not %s", d.flag, d.has, d.wants)
		}
		return failf(exitConflict, "%s exists with other options: %s; add --update to change them at its next start, or --recreate to restart it with them now", o.name, strings.Join(texts, "; "))
	}
	if len(diffs) > 0 {
		if o.recreate && busy(has) {
			if err := a.confirm(o.yes, "This ends what runs in "+o.name); err != nil {
				return err
			}
		}
		updated, err := api.updateSpec(ctx, has, change)
		if err != nil {
			return err
		}
		for _, d := range diffs {
			a.say("%s: %s -> %s", d.flag, d.has, d.wants)
		}
		has = updated
	}
	return a.startExisting(ctx, api, o, has, len(diffs) > 0)
}

func (c *api) updateSpec(ctx context.Context, has *carrelv1.Workspace, change specChange) (*carrelv1.Workspace, error) {
	resp, err := c.workspaces.Update(ctx, connect.NewRequest(&carrelv1.UpdateRequest{
		Workspace: has.GetId(), Spec: change.spec, Fields: change.fields, IfVersion: has.GetVersion(),
	}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetWorkspace(), nil
}

func (a *app) startExisting(ctx context.Context, api *api, o upOptions, has *carrelv1.Workspace, changed bool) error {
	ref := has.GetId()
	after := int64(0)
	switch {
	case busy(has) && changed && o.recreate:
		after = has.GetRun().GetEpoch()
		resp, err := api.workspaces.Restart(context.WithoutCancel(ctx), connect.NewRequest(&carrelv1.RestartRequest{Workspace: ref, RequestId: requestID()}))
		if err != nil {
			return err
		}
		has = resp.Msg.GetWorkspace()
	case !busy(has) || has.GetState() == carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPING:
		resp, err := api.workspaces.Start(context.WithoutCancel(ctx), connect.NewRequest(&carrelv1.StartRequest{Workspace: ref, RequestId: requestID()}))
		if err != nil {
			return err
		}
		has = resp.Msg.GetWorkspace()
	case len(has.GetPending()) > 0:
		a.say("%s takes effect at the next restart: `carrel restart %s`", strings.Join(has.GetPending(), ", "), has.GetName())
	}
	return a.finishUp(ctx, api, o, has, after)
}

// busy reports whether a run is under way.
func busy(w *carrelv1.Workspace) bool {
	switch w.GetState() {
	case carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED, carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED:
		return false
	default:
		return true
	}
}

// finishUp waits for a workspace, unless asked not to, and says how to reach it.
func (a *app) finishUp(ctx context.Context, api *api, o upOptions, w *carrelv1.Workspace, afterEpoch int64) error {
	if !o.noWait {
		var err error
		if w, err = a.waitReady(ctx, api, waitFor{workspace: w, afterEpoch: afterEpoch, quiet: o.quiet}); err != nil {
			return err
		}
	}
	entries := a.refreshQuietly(ctx, api)
	if f, err := a.format(o.format); err != nil || f == output.JSON {
		return firstError(err, output.WriteJSON(a.sys.Out, viewWorkspace(w)))
	}
	how := a.sshCommand(entries, w, api.dep.Name)
	switch {
	case o.quiet:
		return a.print("%s", w.GetName())
	case o.noWait:
		return a.print("%s: %s; when it is ready: %s", w.GetName(), viewWorkspace(w).stateText(), how)
	default:
		return a.print("ready: %s", how)
	}
}

// requestID names one request, so that the gateway knows a retry.
func requestID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}
