package command

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

// lifeOptions are the flags of start, stop and restart.
type lifeOptions struct {
	noWait      bool
	quiet       bool
	format      string
	updateImage bool
	grace       time.Duration
}

func (o *lifeOptions) register(a *app, cmd *cobra.Command) {
	a.formatFlag(cmd, &o.format)
	cmd.Flags().BoolVarP(&o.noWait, "no-wait", "d", false, "return at once")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "no progress; only the name")
}

func newStart(a *app) *cobra.Command {
	o := lifeOptions{}
	cmd := &cobra.Command{
		Use:   "start NAME",
		Short: "Start a stopped workspace and wait until it is ready",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.begin(cmd.Context(), o, func(ctx context.Context, api *api) (*carrelv1.Workspace, int64, error) {
				resp, err := api.workspaces.Start(ctx, connect.NewRequest(&carrelv1.StartRequest{Workspace: args[0], RequestId: requestID()}))
				if err != nil {
					return nil, 0, err
				}
				return resp.Msg.GetWorkspace(), 0, nil
			})
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	o.register(a, cmd)
	return cmd
}

func newRestart(a *app) *cobra.Command {
	o := lifeOptions{}
	cmd := &cobra.Command{
		Use:   "restart NAME",
		Short: "End the container and start another on the same GPUs; files stay",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.begin(cmd.Context(), o, func(ctx context.Context, api *api) (*carrelv1.Workspace, int64, error) {
				has, err := api.workspace(ctx, args[0])
				if err != nil {
					return nil, 0, err
				}
				resp, err := api.workspaces.Restart(ctx, connect.NewRequest(&carrelv1.RestartRequest{
					Workspace: has.GetId(), UpdateImage: o.updateImage, RequestId: requestID(),
				}))
				if err != nil {
					return nil, 0, err
				}
				after := int64(0)
				if busy(has) {
					after = has.GetRun().GetEpoch()
				}
				return resp.Msg.GetWorkspace(), after, nil
			})
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	o.register(a, cmd)
	cmd.Flags().BoolVar(&o.updateImage, "update-image", false, "take what the image's name stands for now")
	return cmd
}

// begin makes the call that starts a run and waits like `up`. Ctrl-C does not end the call, so that its outcome is known.
func (a *app) begin(ctx context.Context, o lifeOptions, call func(context.Context, *api) (*carrelv1.Workspace, int64, error)) error {
	if err := a.early(listFlags{format: o.format}); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	w, after, err := call(context.WithoutCancel(ctx), api)
	if err != nil {
		return err
	}
	return a.finishUp(ctx, api, upOptions{noWait: o.noWait, quiet: o.quiet, format: o.format}, w, after)
}

func newStop(a *app) *cobra.Command {
	o := lifeOptions{}
	cmd := &cobra.Command{
		Use:   "stop NAME",
		Short: "End the container and give its GPUs back; files stay",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.stop(cmd.Context(), args[0], o)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	o.register(a, cmd)
	cmd.Flags().DurationVar(&o.grace, "grace", 0, "time between the polite and the hard signal (default: the deployment's)")
	return cmd
}

func (a *app) stop(ctx context.Context, ref string, o lifeOptions) error {
	if err := a.early(listFlags{format: o.format}); err != nil {
		return err
	}
	if o.grace < 0 {
		return usagef("--grace %v: must not be negative", o.grace)
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	req := &carrelv1.StopRequest{Workspace: ref}
	if o.grace > 0 {
		req.Grace = durationpb.New(o.grace)
	}
	resp, err := api.workspaces.Stop(context.WithoutCancel(ctx), connect.NewRequest(req))
	if err != nil {
		return err
	}
	w := resp.Msg.GetWorkspace()
	if !o.noWait {
		if w, err = a.waitEnded(ctx, api, w, o.quiet); err != nil {
			return err
		}
	}
	if f, err := a.format(o.format); err != nil || f == output.JSON {
		return firstError(err, output.WriteJSON(a.sys.Out, viewWorkspace(w)))
	}
	if o.quiet {
		return a.print("%s", w.GetName())
	}
	return a.print("%s is %s; its files are kept", w.GetName(), word(w.GetState()))
}

// waitEnded waits until the run of a workspace is gone.
func (a *app) waitEnded(ctx context.Context, api *api, w *carrelv1.Workspace, quiet bool) (*carrelv1.Workspace, error) {
	p := output.NewProgress(a.sys.Err, a.sys.ErrTerminal, a.sys.Width)
	last := w
	seen := func(w *carrelv1.Workspace) (bool, error) {
		if w.GetVersion() < last.GetVersion() {
			return false, nil
		}
		last = w
		switch w.GetState() {
		case carrelv1.WorkspaceState_WORKSPACE_STATE_STOPPED, carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED, carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED:
			return true, nil
		default:
			if !quiet {
				p.Show(a.progressText(w))
			}
			return false, nil
		}
	}
	done, err := seen(w)
	if !done && err == nil {
		err = api.watch(ctx, &carrelv1.WatchRequest{Workspace: w.GetId()}, watchEvents{State: seen, Lost: func(text string) { p.Say("carrel: " + text) }, Patient: true})
	}
	p.Done()
	if hasCode(err, exitInterrupted) {
		err = failf(exitInterrupted, "stopped waiting; %s is %s and goes on by itself", last.GetName(), word(last.GetState()))
	}
	if hasCode(err, exitNotFound) { // a deleted workspace is no longer there to watch
		return last, nil
	}
	return last, err
}

func newRemove(a *app) *cobra.Command {
	var volume, yes, noWait bool
	cmd := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"delete"},
		Short:   "Remove a workspace; its home is kept as a volume unless --volume says otherwise",
		Args:    exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.remove(cmd.Context(), args[0], removeOptions{volume, yes, noWait})
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	cmd.Flags().BoolVar(&volume, "volume", false, "the home volume too; it can be restored for 7 days")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().BoolVarP(&noWait, "no-wait", "d", false, "return at once")
	return cmd
}

type removeOptions struct{ volume, yes, noWait bool }

func (a *app) remove(ctx context.Context, ref string, o removeOptions) error {
	api, err := a.connect()
	if err != nil {
		return err
	}
	has, err := api.workspace(ctx, ref)
	if err != nil {
		return err
	}
	if o.volume {
		if err := a.confirm(o.yes, "This deletes workspace "+has.GetName()+" and the files in its home"); err != nil {
			return err
		}
	}
	resp, err := api.workspaces.Delete(context.WithoutCancel(ctx), connect.NewRequest(&carrelv1.DeleteRequest{Workspace: has.GetId(), DeleteHome: o.volume}))
	if err != nil {
		return err
	}
	if !o.noWait {
		if _, err := a.waitEnded(ctx, api, resp.Msg.GetWorkspace(), false); err != nil {
			return err
		}
	}
	a.refreshQuietly(ctx, api)
	text := fmt.Sprintf("%s is removed", has.GetName())
	for i, v := range resp.Msg.GetKeptVolumes() {
		if i == 0 {
			text += "; kept: "
		} else {
			text += ", "
		}
		text += v
	}
	return a.print("%s", text)
}
