package command

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

func newShow(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show all about one workspace",
		Args:  exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.show(cmd.Context(), args[0], format)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	a.formatFlag(cmd, &format)
	return cmd
}

func (c *api) workspace(ctx context.Context, ref string) (*carrelv1.Workspace, error) {
	resp, err := c.workspaces.Get(ctx, connect.NewRequest(&carrelv1.GetRequest{Workspace: ref}))
	if err != nil {
		return nil, err
	}
	return resp.Msg.GetWorkspace(), nil
}

func (a *app) show(ctx context.Context, ref, format string) error {
	if err := a.early(listFlags{format: format}); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	w, err := api.workspace(ctx, ref)
	if err != nil {
		return err
	}
	v := viewWorkspace(w)
	return a.showOne(format, v, a.pairs(v))
}

// pairs are the lines of `show`, each value with where it came from.
func (a *app) pairs(v workspaceView) [][2]string {
	from := func(value, field string) string {
		if o := v.Origins[field]; o != "" && value != "" {
			return value + "  (" + o + ")"
		}
		return value
	}
	rows := [][2]string{
		{"name", v.Name}, {"id", v.ID}, {"owner", v.Owner}, {"project", from(v.Project, "project")}, {"state", v.stateText()}, {"why", v.note()},
	}
	if v.Reason != nil && v.Reason.ExitCode != nil {
		rows = append(rows, [2]string{"exit status", fmt.Sprint(*v.Reason.ExitCode)})
	}
	rows = append(rows, [][2]string{
		{"host", v.Host},
		{"pool", from(v.Pool, "pool")},
		{"image", from(v.Image, "image")},
		{"image digest", v.ImageDigest},
		{"gpus asked for", from(gpuText(v.GPUs, v.GPUModels), "gpu")},
		{"cpus", from(cpuText(v.CPUMillis), "cpu_millis")},
		{"memory", from(sizeOrDash(v.MemoryMiB), "memory_mib")},
		{"shm", from(sizeOrDash(v.SHMMiB), "shm_mib")},
		{"processes", from(countOrDash(v.PIDsLimit), "pids_limit")},
	}...)
	if len(v.Env) > 0 {
		rows = append(rows, [2]string{"env", envText(v.Env)})
	}
	for _, m := range v.Mounts {
		rows = append(rows, [2]string{"volume", m.text()})
	}
	for _, d := range v.Devices {
		rows = append(rows, [2]string{"gpu", strings.TrimSpace(strings.Join([]string{d.Host + "/" + fmt.Sprint(d.Index), d.title(), d.ID, d.memoryText(), d.utilText(), d.fault()}, "  "))})
	}
	if v.Run != nil {
		rows = append(rows, [][2]string{
			{"run", fmt.Sprint(v.Run.Epoch)},
			{"queued", v.Run.QueuedAt.stamp()},
			{"placed", v.Run.PlacedAt.stamp()},
			{"started", v.Run.StartedAt.stamp()},
			{"ended", v.Run.EndedAt.stamp()},
		}...)
	}
	if v.IdleSeconds != nil {
		rows = append(rows, [2]string{"gpu idle for", output.Age(time.Duration(*v.IdleSeconds) * time.Second)})
	}
	rows = append(rows, [][2]string{
		{"at next restart", strings.Join(v.Pending, ", ")}, {"login", v.Login}, {"sudo", v.Sudo}, {"ssh host", v.SSHHost}, {"created", v.CreatedAt.stamp()},
	}...)
	if v.Reason != nil {
		for _, l := range v.Reason.LogTail {
			rows = append(rows, [2]string{"log", l})
		}
	}
	return rows
}
