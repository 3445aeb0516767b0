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

// deviceView is a GPU in `-o json`.
type deviceView struct {
	ID           string        `json:"id"`
	Host         string        `json:"host"`
	Pool         string        `json:"pool"`
	Index        int32         `json:"index"`
	Product      string        `json:"product"`
	Model        string        `json:"model"`
	MemoryMiB    int64         `json:"memory_mib"`
	Capability   string        `json:"compute_capability"`
	PCI          string        `json:"pci_bus_id"`
	Kind         string        `json:"kind"`
	Parent       string        `json:"parent,omitempty"`
	Simulated    bool          `json:"simulated"`
	Health       string        `json:"health"`
	HealthReason string        `json:"health_reason,omitempty"`
	Free         bool          `json:"free"`
	Workspace    string        `json:"workspace"`
	User         string        `json:"user"`
	LeasedAt     *moment       `json:"leased_at,omitempty"`
	SampledAt    *moment       `json:"sampled_at,omitempty"`
	Stale        bool          `json:"stale"`
	Utilization  *int32        `json:"utilization_percent,omitempty"`
	MemoryUsed   *int64        `json:"memory_used_mib,omitempty"`
	Power        *float64      `json:"power_watts,omitempty"`
	Temperature  *int32        `json:"temperature_celsius,omitempty"`
	Processes    []processView `json:"processes"`
}

type processView struct {
	PID       int64  `json:"pid"`
	Name      string `json:"name"`
	MemoryMiB *int64 `json:"memory_mib,omitempty"`
	Graphics  bool   `json:"graphics"`
	Workspace string `json:"workspace"`
	User      string `json:"user"`
}

func viewDevice(d *carrelv1.Device) deviceView {
	s := d.GetSample()
	v := deviceView{
		ID: d.GetId(), Host: d.GetHost(), Pool: d.GetPool(), Index: d.GetIndex(), Product: d.GetProduct(), Model: d.GetModel(),
		MemoryMiB: d.GetMemoryMib(), Capability: d.GetComputeCapability(), PCI: d.GetPciBusId(), Kind: word(d.GetKind()), Parent: d.GetParent(),
		Simulated: d.GetSimulated(), Health: d.GetHealth(), HealthReason: d.GetHealthReason(), Free: d.GetFree(),
		Workspace: d.GetWorkspace(), User: d.GetUser(), LeasedAt: momentOf(d.GetLeasedAt()), Processes: []processView{},
	}
	if s != nil {
		v.SampledAt, v.Stale = momentOf(s.GetAt()), s.GetStale()
		v.Utilization, v.MemoryUsed, v.Power, v.Temperature = s.UtilizationPercent, s.MemoryUsedMib, s.PowerWatts, s.TemperatureCelsius
	}
	for _, p := range s.GetProcesses() {
		v.Processes = append(v.Processes, processView{p.GetPid(), p.GetName(), p.MemoryMib, p.GetGraphics(), p.GetWorkspace(), p.GetUser()})
	}
	return v
}

func (d deviceView) title() string {
	if d.Simulated {
		return d.Model + " (simulated)"
	}
	return d.Model
}

func (d deviceView) memoryText() string {
	if d.MemoryUsed == nil {
		return "-/" + output.MiB(d.MemoryMiB)
	}
	return output.MiB(*d.MemoryUsed) + "/" + output.MiB(d.MemoryMiB)
}

func (d deviceView) utilText() string {
	if d.Utilization == nil {
		return "-"
	}
	text := fmt.Sprintf("%d%%", *d.Utilization)
	if d.Stale {
		text += "?"
	}
	return text
}

// holder says who has it, or why nobody can.
func (d deviceView) holder() string {
	switch {
	case d.Workspace != "":
		return d.User + "/" + d.Workspace
	case d.User != "":
		return d.User
	case d.LeasedAt != nil:
		return "in use"
	case d.Free:
		return "free"
	case d.Health != "ok" && d.Health != "":
		return "-"
	default:
		return "-"
	}
}

func (d deviceView) healthText() string {
	if d.Kind == "mig_parent" && d.Health == "ok" {
		return "ok (split by MIG)"
	}
	if d.HealthReason != "" {
		return d.Health + ": " + d.HealthReason
	}
	return d.Health
}

// fault is what is wrong with a device that somebody holds; empty when nothing is.
func (d deviceView) fault() string {
	if d.Health == "ok" || d.Health == "" || d.Health == "no_runtime" {
		return ""
	}
	return d.healthText()
}

func (d deviceView) color() string {
	switch {
	case d.Free:
		return output.Green
	case d.Health != "ok":
		return output.Red
	default:
		return ""
	}
}

type gpusOptions struct {
	listFlags
	free  bool
	pool  string
	watch bool
}

func newGPUs(a *app) *cobra.Command {
	o := gpusOptions{}
	cmd := &cobra.Command{
		Use:     "gpus",
		Aliases: []string{"gpu"},
		Short:   "List GPUs: model, memory, use, who holds them",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.gpus(cmd.Context(), o)
		},
	}
	a.listFlags(cmd, &o.listFlags)
	cmd.Flags().BoolVar(&o.free, "free", false, "only those that can be leased now")
	cmd.Flags().StringVar(&o.pool, "pool", "", "only this pool's")
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "go on showing changes until Ctrl-C")
	cmd.AddCommand(newGPUExclude(a, "exclude", true), newGPUExclude(a, "include", false))
	return cmd
}

func newGPUExclude(a *app, verb string, excluded bool) *cobra.Command {
	var reason string
	short := "Give a GPU back into use (admins)"
	if excluded {
		short = "Take a GPU out of use; a running lease goes on (admins)"
	}
	cmd := &cobra.Command{
		Use: verb + " ID", Short: short, Args: exactArgs("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.devices.SetExcluded(cmd.Context(), connect.NewRequest(&carrelv1.SetExcludedRequest{DeviceId: args[0], Excluded: excluded, Reason: reason}))
			if err != nil {
				return err
			}
			return a.print("%s: %s", resp.Msg.GetDevice().GetId(), viewDevice(resp.Msg.GetDevice()).healthText())
		},
	}
	if excluded {
		cmd.Flags().StringVar(&reason, "reason", "", "why, shown to users")
	}
	return cmd
}

func (c *api) allDevices(ctx context.Context, pool string, free bool) ([]deviceView, error) {
	all, err := allPages(func(token string) ([]*carrelv1.Device, string, error) {
		resp, err := c.devices.List(ctx, connect.NewRequest(&carrelv1.DeviceServiceListRequest{PageSize: pageSize, PageToken: token, Pool: pool, FreeOnly: free}))
		if err != nil {
			return nil, "", err
		}
		return resp.Msg.GetDevices(), resp.Msg.GetNextPageToken(), nil
	})
	views := make([]deviceView, len(all))
	for i, d := range all {
		views[i] = viewDevice(d)
	}
	return views, err
}

func (a *app) gpus(ctx context.Context, o gpusOptions) error {
	if err := a.early(o.listFlags); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	show := func(devices []deviceView) error {
		return writeList(a, deviceList(a.sys.Now()), devices, o.listFlags)
	}
	if o.watch {
		return a.watchDevices(ctx, api, o.pool, func(all []deviceView) error {
			kept := make([]deviceView, 0, len(all))
			for _, d := range all {
				if d.Free || !o.free {
					kept = append(kept, d)
				}
			}
			return show(kept)
		})
	}
	devices, err := api.allDevices(ctx, o.pool, o.free)
	if err != nil {
		return err
	}
	return show(devices)
}

func deviceList(now time.Time) output.List[deviceView] {
	type col = output.Column[deviceView]
	num := func(p *int64) string {
		if p == nil {
			return ""
		}
		return fmt.Sprint(*p)
	}
	return output.List[deviceView]{
		Columns: []col{
			{Name: "host", Title: "HOST", Text: func(d deviceView) string { return d.Host }},
			{Name: "index", Title: "GPU", Right: true, Text: func(d deviceView) string { return fmt.Sprint(d.Index) }},
			{Name: "model", Title: "MODEL", Text: deviceView.title, Value: func(d deviceView) string { return d.Model }},
			{Name: "pool", Title: "POOL", Text: func(d deviceView) string { return d.Pool }},
			{Name: "memory_used_mib", Title: "MEMORY", Right: true, Text: deviceView.memoryText, Value: func(d deviceView) string { return num(d.MemoryUsed) }},
			{Name: "memory_mib", Text: func(d deviceView) string { return fmt.Sprint(d.MemoryMiB) }},
			{Name: "utilization_percent", Title: "USE", Right: true, Text: deviceView.utilText, Value: func(d deviceView) string {
				if d.Utilization == nil {
					return ""
				}
				return fmt.Sprint(*d.Utilization)
			}},
			{Name: "health", Title: "HEALTH", Text: deviceView.healthText, Value: func(d deviceView) string { return d.Health }, Color: deviceView.color},
			{Name: "holder", Title: "HELD BY", Text: deviceView.holder},
			{Name: "leased_at", Title: "SINCE", Text: func(d deviceView) string { return d.LeasedAt.ago(now) }, Value: func(d deviceView) string { return d.LeasedAt.text() }},
			{Name: "simulated", Text: func(d deviceView) string { return fmt.Sprint(d.Simulated) }},
			{Name: "id", Title: "ID", Text: func(d deviceView) string { return d.ID }},
		},
		ID:    func(d deviceView) string { return d.ID },
		Empty: "no GPUs",
	}
}

// watchDevices shows all devices at each change.
func (a *app) watchDevices(ctx context.Context, api *api, pool string, show func([]deviceView) error) error {
	screen := newScreen(a)
	return api.keepUp(ctx, persistence{lost: func(text string) { a.say("carrel: %s", text) }}, func(ctx context.Context, alive func()) (bool, error) {
		stream, err := api.devices.Watch(ctx, connect.NewRequest(&carrelv1.DeviceServiceWatchRequest{Pool: pool}))
		if err != nil {
			return false, err
		}
		defer func() { _ = stream.Close() }()
		seen := devicesSeen{}
		complete := false
		for stream.Receive() {
			alive()
			seen.take(stream.Msg().GetDevices())
			complete = complete || stream.Msg().GetComplete()
			if complete {
				if err := screen.draw(func() error { return show(seen.list()) }); err != nil {
					return true, err
				}
			}
		}
		return false, stream.Err()
	})
}

// belongsTo reports whether a device is held by one workspace, given by name, OWNER/NAME or prefix.
func belongsTo(d deviceView, ref string) bool {
	if ref == "" {
		return true
	}
	owner, name, ok := strings.Cut(ref, "/")
	if !ok {
		owner, name = "", ref
	}
	return strings.HasPrefix(d.Workspace, name) && (owner == "" || owner == d.User) && d.Workspace != ""
}
