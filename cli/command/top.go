package command

import (
	"context"
	"fmt"
	"sort"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

// topRow is one process on a GPU; a GPU without processes has one row without any.
type topRow struct {
	Host        string `json:"host"`
	Index       int32  `json:"index"`
	Device      string `json:"device_id"`
	Model       string `json:"model"`
	Utilization *int32 `json:"utilization_percent,omitempty"`
	MemoryUsed  *int64 `json:"memory_used_mib,omitempty"`
	MemoryMiB   int64  `json:"memory_mib"`
	HolderWS    string `json:"held_by_workspace"`
	HolderUser  string `json:"held_by_user"`
	PID         int64  `json:"pid,omitempty"`
	Process     string `json:"process,omitempty"`
	ProcessMiB  *int64 `json:"process_memory_mib,omitempty"`
	Workspace   string `json:"workspace"`
	User        string `json:"user"`
	Graphics    bool   `json:"graphics"`
	Note        string `json:"note"`

	device deviceView
	first  bool
}

func newTop(a *app) *cobra.Command {
	o := listFlags{}
	var pool string
	var watch bool
	cmd := &cobra.Command{
		Use:   "top [NAME]",
		Short: "Which process of which workspace and user uses how much of which GPU",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("carrel top: one NAME at most")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ref := ""
			if len(args) == 1 {
				ref = args[0]
			}
			return a.top(cmd.Context(), ref, pool, watch, o)
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	a.listFlags(cmd, &o)
	cmd.Flags().StringVar(&pool, "pool", "", "only this pool's")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on showing changes until Ctrl-C")
	return cmd
}

func (a *app) top(ctx context.Context, ref, pool string, watch bool, o listFlags) error {
	if err := a.early(o); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	if ref != "" {
		w, err := api.workspace(ctx, ref)
		if err != nil {
			return err
		}
		ref = w.GetOwner() + "/" + w.GetName()
	}
	show := func(devices []deviceView) error { return writeList(a, topList(), topRows(devices, ref), o) }
	if watch {
		return a.watchDevices(ctx, api, pool, show)
	}
	devices, err := api.allDevices(ctx, pool, false)
	if err != nil {
		return err
	}
	return show(devices)
}

func topRows(devices []deviceView, ref string) []topRow {
	rows := []topRow{}
	for _, d := range devices {
		if !belongsTo(d, ref) {
			continue
		}
		base := topRow{
			Host: d.Host, Index: d.Index, Device: d.ID, Model: d.Model, Utilization: d.Utilization, MemoryUsed: d.MemoryUsed,
			MemoryMiB: d.MemoryMiB, HolderWS: d.Workspace, HolderUser: d.User, device: d, first: true,
		}
		processes := append([]processView{}, d.Processes...)
		sort.SliceStable(processes, func(i, j int) bool { return mib(processes[i]) > mib(processes[j]) })
		if len(processes) == 0 {
			base.Note = heldNote(d)
			rows = append(rows, base)
		}
		for _, p := range processes {
			r := base
			r.PID, r.Process, r.ProcessMiB, r.Workspace, r.User, r.Graphics = p.PID, p.Name, p.MemoryMiB, p.Workspace, p.User, p.Graphics
			r.Note = processNote(d, p)
			rows = append(rows, r)
			base.first = false
		}
	}
	return rows
}

func mib(p processView) int64 {
	if p.MemoryMiB == nil {
		return -1
	}
	return *p.MemoryMiB
}

// heldNote says that a device is held by somebody who has no process on it.
func heldNote(d deviceView) string {
	if d.LeasedAt != nil || d.Workspace != "" {
		return "held, no process"
	}
	return ""
}

// processNote says what is odd about a process.
func processNote(d deviceView, p processView) string {
	switch {
	case p.Graphics:
		return "graphics"
	case p.Workspace == "":
		return "not of a workspace"
	case p.Workspace != d.Workspace || p.User != d.User:
		return "not the holder's"
	case d.Utilization != nil && *d.Utilization == 0 && mib(p) > 0:
		return "holds memory, idle"
	}
	return ""
}

func topList() output.List[topRow] {
	type col = output.Column[topRow]
	opt := func(p *int64) string {
		if p == nil {
			return ""
		}
		return fmt.Sprint(*p)
	}
	once := func(text func(topRow) string) func(topRow) string { // the device's own columns on its first line only
		return func(r topRow) string {
			if !r.first {
				return ""
			}
			return text(r)
		}
	}
	return output.List[topRow]{
		Columns: []col{
			{Name: "host", Title: "HOST", Text: once(func(r topRow) string { return r.Host }), Value: func(r topRow) string { return r.Host }},
			{Name: "index", Title: "GPU", Right: true, Text: once(func(r topRow) string { return fmt.Sprint(r.Index) }), Value: func(r topRow) string { return fmt.Sprint(r.Index) }},
			{Name: "model", Title: "MODEL", Text: once(func(r topRow) string { return r.device.title() }), Value: func(r topRow) string { return r.Model }},
			{Name: "utilization_percent", Title: "USE", Right: true, Text: once(func(r topRow) string { return r.device.utilText() }), Value: func(r topRow) string {
				if r.Utilization == nil {
					return ""
				}
				return fmt.Sprint(*r.Utilization)
			}},
			{Name: "memory_used_mib", Title: "MEMORY", Right: true, Text: once(func(r topRow) string { return r.device.memoryText() }), Value: func(r topRow) string { return opt(r.MemoryUsed) }},
			{Name: "held_by", Title: "HELD BY", Text: once(func(r topRow) string { return r.device.holder() }), Value: func(r topRow) string { return r.device.holder() }},
			{Name: "process_memory_mib", Title: "PROC MEM", Right: true, Text: func(r topRow) string {
				switch {
				case r.PID == 0:
					return ""
				case r.ProcessMiB == nil:
					return "-"
				default:
					return output.MiB(*r.ProcessMiB)
				}
			}, Value: func(r topRow) string { return opt(r.ProcessMiB) }},
			{Name: "pid", Title: "PID", Right: true, Text: func(r topRow) string { return pidText(r.PID) }},
			{Name: "process", Title: "PROCESS", Text: func(r topRow) string { return r.Process }},
			{Name: "workspace", Title: "WORKSPACE", Text: func(r topRow) string { return r.Workspace }},
			{Name: "user", Title: "USER", Text: func(r topRow) string { return r.User }},
			{Name: "note", Title: "NOTE", Text: func(r topRow) string { return r.Note }, Color: func(topRow) string { return output.Yellow }},
		},
		ID: func(r topRow) string {
			if r.PID == 0 {
				return r.Device
			}
			return fmt.Sprint(r.PID)
		},
		Empty: "no GPUs",
	}
}

func pidText(pid int64) string {
	if pid == 0 {
		return ""
	}
	return fmt.Sprint(pid)
}

// devicesSeen is the picture that a watch has built up.
type devicesSeen map[string]deviceView

func (s devicesSeen) take(devices []*carrelv1.Device) {
	for _, d := range devices {
		s[d.GetId()] = viewDevice(d)
	}
}

func (s devicesSeen) list() []deviceView {
	all := make([]deviceView, 0, len(s))
	for _, d := range s {
		all = append(all, d)
	}
	sort.Slice(all, func(i, j int) bool {
		if all[i].Host != all[j].Host {
			return all[i].Host < all[j].Host
		}
		if all[i].Index != all[j].Index {
			return all[i].Index < all[j].Index
		}
		return all[i].ID < all[j].ID
	})
	return all
}
