package command

import (
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type hostView struct {
	ID               string   `json:"id"`
	Name             string   `json:"name"`
	Pool             string   `json:"pool"`
	State            string   `json:"state"`
	UnreachableSince *moment  `json:"unreachable_since,omitempty"`
	AgentVersion     string   `json:"agent_version"`
	EngineVersion    string   `json:"engine_version"`
	OS               string   `json:"os"`
	CPUs             int32    `json:"cpus"`
	MemoryMiB        int64    `json:"memory_mib"`
	DiskFreeMiB      int64    `json:"disk_free_mib"`
	GPUSource        string   `json:"gpu_source"`
	DriverVersion    string   `json:"driver_version"`
	CUDAVersion      string   `json:"cuda_version"`
	GPUs             int32    `json:"gpus"`
	GPUsFree         int32    `json:"gpus_free"`
	ClockSkewMs      int64    `json:"clock_skew_ms"`
	Problems         []string `json:"problems"`
	Unmanaged        []string `json:"unmanaged"`
	JoinedAt         *moment  `json:"joined_at"`
}

func viewHost(h *carrelv1.Host) hostView {
	return hostView{
		ID: h.GetId(), Name: h.GetName(), Pool: h.GetPool(), State: h.GetState(), UnreachableSince: momentOf(h.GetUnreachableSince()),
		AgentVersion: h.GetAgentVersion(), EngineVersion: h.GetEngineVersion(), OS: h.GetOs(), CPUs: h.GetCpus(), MemoryMiB: h.GetMemoryMib(),
		DiskFreeMiB: h.GetDiskFreeMib(), GPUSource: h.GetGpuSource(), DriverVersion: h.GetDriverVersion(), CUDAVersion: h.GetCudaVersion(),
		GPUs: h.GetGpus(), GPUsFree: h.GetGpusFree(), ClockSkewMs: h.GetClockSkewMs(), Problems: emptyIfNil(h.GetProblems()),
		Unmanaged: emptyIfNil(h.GetUnmanaged()), JoinedAt: momentOf(h.GetJoinedAt()),
	}
}

func newHost(a *app) *cobra.Command {
	return group("host", "Machines with GPUs (admins)", newHostList(a), newHostToken(a), newHostDrain(a), newHostFence(a))
}

func newHostList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List hosts", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			all, err := allPages(func(token string) ([]*carrelv1.Host, string, error) {
				resp, err := api.hosts.List(cmd.Context(), connect.NewRequest(&carrelv1.HostServiceListRequest{PageSize: pageSize, PageToken: token}))
				if err != nil {
					return nil, "", err
				}
				return resp.Msg.GetHosts(), resp.Msg.GetNextPageToken(), nil
			})
			if err != nil {
				return err
			}
			return writeList(a, hostList(), each(all, viewHost), o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func hostList() output.List[hostView] {
	type col = output.Column[hostView]
	return output.List[hostView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(h hostView) string { return h.Name }},
			{Name: "pool", Title: "POOL", Text: func(h hostView) string { return h.Pool }},
			{Name: "state", Title: "STATE", Text: func(h hostView) string {
				if h.UnreachableSince != nil {
					return h.State + " since " + h.UnreachableSince.stamp()
				}
				return h.State
			}, Value: func(h hostView) string { return h.State }, Color: func(h hostView) string {
				switch h.State {
				case "ready":
					return output.Green
				case "unreachable", "fenced":
					return output.Red
				}
				return output.Yellow
			}},
			{Name: "gpus_free", Title: "FREE/GPUS", Right: true, Text: func(h hostView) string { return fmt.Sprintf("%d/%d", h.GPUsFree, h.GPUs) }, Value: func(h hostView) string { return fmt.Sprint(h.GPUsFree) }},
			{Name: "gpus", Text: func(h hostView) string { return fmt.Sprint(h.GPUs) }},
			{Name: "gpu_source", Title: "SOURCE", Text: func(h hostView) string { return h.GPUSource }},
			{Name: "cpus", Title: "CPUS", Right: true, Text: func(h hostView) string { return fmt.Sprint(h.CPUs) }},
			{Name: "memory_mib", Title: "MEMORY", Right: true, Text: func(h hostView) string { return output.MiB(h.MemoryMiB) }, Value: func(h hostView) string { return fmt.Sprint(h.MemoryMiB) }},
			{Name: "disk_free_mib", Title: "DISK FREE", Right: true, Text: func(h hostView) string { return output.MiB(h.DiskFreeMiB) }, Value: func(h hostView) string { return fmt.Sprint(h.DiskFreeMiB) }},
			{Name: "driver_version", Title: "DRIVER", Text: func(h hostView) string { return orDash(h.DriverVersion) }, Value: func(h hostView) string { return h.DriverVersion }},
			{Name: "cuda_version", Title: "CUDA", Text: func(h hostView) string { return orDash(h.CUDAVersion) }, Value: func(h hostView) string { return h.CUDAVersion }},
			{Name: "agent_version", Title: "AGENT", Text: func(h hostView) string { return orDash(h.AgentVersion) }, Value: func(h hostView) string { return h.AgentVersion }},
			{Name: "clock_skew_ms", Text: func(h hostView) string { return fmt.Sprint(h.ClockSkewMs) }},
			{Name: "unmanaged", Text: func(h hostView) string { return strings.Join(h.Unmanaged, " ") }},
			{Name: "problems", Title: "PROBLEMS", Text: func(h hostView) string { return strings.Join(h.Problems, "; ") }, Color: func(hostView) string { return output.Red }},
			{Name: "id", Text: func(h hostView) string { return h.ID }},
		},
		ID:    func(h hostView) string { return h.Name },
		Empty: "no hosts; `carrel host token` makes a token for the first",
	}
}

const maxJoinTTL = time.Hour // as CreateJoinTokenRequest.ttl

func newHostToken(a *app) *cobra.Command {
	var pool, host string
	var ttl time.Duration
	cmd := &cobra.Command{
		Use: "token", Short: "Make a one-use token with which an agent joins (admins)", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ttl < 0 || ttl > maxJoinTTL {
				return usagef("--ttl %v: more than 0, up to %v", ttl, maxJoinTTL)
			}
			req := &carrelv1.CreateJoinTokenRequest{Pool: pool, Host: host}
			if ttl > 0 {
				req.Ttl = durationpb.New(ttl)
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.hosts.CreateJoinToken(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			a.say("good for one host until %s; on that host: carreld agent --join TOKEN", momentOf(resp.Msg.GetExpiresAt()).stamp())
			return a.print("%s", resp.Msg.GetToken())
		},
	}
	cmd.Flags().StringVar(&pool, "pool", "", "pool that the host will serve")
	cmd.Flags().StringVar(&host, "host", "", "only a host of this name may use it")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "how long it is good for (default: 1h)")
	return cmd
}

func newHostDrain(a *app) *cobra.Command {
	var undo bool
	cmd := &cobra.Command{
		Use: "drain NAME", Short: "Place nothing new on a host; what runs goes on (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.hosts.SetDraining(cmd.Context(), connect.NewRequest(&carrelv1.SetDrainingRequest{Host: args[0], Draining: !undo}))
			if err != nil {
				return err
			}
			return a.print("%s is %s", resp.Msg.GetHost().GetName(), resp.Msg.GetHost().GetState())
		},
	}
	cmd.Flags().BoolVar(&undo, "undo", false, "allow placements again")
	return cmd
}

func newHostFence(a *app) *cobra.Command {
	var reason string
	var yes bool
	cmd := &cobra.Command{
		Use: "fence NAME", Short: "Declare that nothing of a host that does not answer can still hold its GPUs, which ends its leases (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.confirm(yes, "Is host "+args[0]+" off, or sure to run nothing of ours any more"); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.hosts.Fence(cmd.Context(), connect.NewRequest(&carrelv1.FenceRequest{Host: args[0], Reason: reason}))
			if err != nil {
				return err
			}
			return a.print("%s is %s; leases ended: %d", resp.Msg.GetHost().GetName(), resp.Msg.GetHost().GetState(), resp.Msg.GetLeasesEnded())
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why; kept with the fence")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	return cmd
}
