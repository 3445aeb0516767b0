package command

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

// workspaceView is a workspace in `-o json`; the names are stable, see docs/cli.md.
type workspaceView struct {
	ID               string            `json:"id"`
	Name             string            `json:"name"`
	Owner            string            `json:"owner"`
	Project          string            `json:"project"`
	State            string            `json:"state"`
	Reason           *reasonView       `json:"reason,omitempty"`
	Queue            *queueView        `json:"queue,omitempty"`
	Pull             *pullView         `json:"pull,omitempty"`
	Host             string            `json:"host"`
	UnreachableSince *moment           `json:"host_unreachable_since,omitempty"`
	Pool             string            `json:"pool"`
	Image            string            `json:"image"`
	ImageDigest      string            `json:"image_digest"`
	GPUs             int32             `json:"gpus"`
	GPUModels        []string          `json:"gpu_models"`
	CPUMillis        int64             `json:"cpu_millis"`
	MemoryMiB        int64             `json:"memory_mib"`
	SHMMiB           int64             `json:"shm_mib"`
	PIDsLimit        int64             `json:"pids_limit"`
	Env              map[string]string `json:"env"`
	Volumes          []volumeMountView `json:"volumes"`
	Origins          map[string]string `json:"origins"`
	Pending          []string          `json:"pending"`
	Run              *runView          `json:"run,omitempty"`
	Leases           []leaseView       `json:"leases"`
	Devices          []deviceView      `json:"devices"`
	Mounts           []mountView       `json:"mounts"`
	Login            string            `json:"login"`
	Sudo             string            `json:"sudo"`
	SSHHost          string            `json:"ssh_host"`
	SSHPrincipal     string            `json:"ssh_principal"`
	ReusedHome       string            `json:"reused_home,omitempty"`
	IdleSeconds      *int64            `json:"idle_seconds,omitempty"`
	Version          int64             `json:"version"`
	CreatedAt        *moment           `json:"created_at"`
}

type reasonView struct {
	Code     string   `json:"code"`
	Message  string   `json:"message"`
	ExitCode *int32   `json:"exit_code,omitempty"`
	LogTail  []string `json:"log_tail,omitempty"`
}

type queueView struct {
	Place    int32    `json:"place"`
	Length   int32    `json:"length"`
	Why      string   `json:"why"`
	Since    *moment  `json:"since"`
	Reserved []string `json:"reserved_devices,omitempty"`
}

type pullView struct {
	Done  int64  `json:"bytes_done"`
	Total int64  `json:"bytes_total"`
	Phase string `json:"phase"`
}

type runView struct {
	Epoch     int64   `json:"epoch"`
	Host      string  `json:"host"`
	Image     string  `json:"image_digest"`
	QueuedAt  *moment `json:"queued_at,omitempty"`
	PlacedAt  *moment `json:"placed_at,omitempty"`
	StartedAt *moment `json:"started_at,omitempty"`
	ReadyAt   *moment `json:"ready_at,omitempty"`
	EndedAt   *moment `json:"ended_at,omitempty"`
}

type leaseView struct {
	ID          string  `json:"id"`
	Device      string  `json:"device_id"`
	Model       string  `json:"model"`
	Host        string  `json:"host"`
	Epoch       int64   `json:"epoch"`
	StartedAt   *moment `json:"started_at"`
	EndedAt     *moment `json:"ended_at,omitempty"`
	ReleasedAt  *moment `json:"released_at,omitempty"`
	Provisional bool    `json:"provisional"`
}

type volumeMountView struct {
	Volume   string `json:"volume"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only"`
}

type mountView struct {
	VolumeID string `json:"volume_id"`
	Name     string `json:"name"`
	Target   string `json:"target"`
	ReadOnly bool   `json:"read_only"`
	Home     bool   `json:"home"`
}

func viewWorkspace(w *carrelv1.Workspace) workspaceView {
	spec := w.GetSpec()
	v := workspaceView{
		ID: w.GetId(), Name: w.GetName(), Owner: w.GetOwner(), Project: w.GetProject(), State: word(w.GetState()),
		Host: w.GetRun().GetHost(), UnreachableSince: momentOf(w.GetHostUnreachableSince()),
		Pool: spec.GetPool(), Image: spec.GetImage(), ImageDigest: spec.GetImageDigest(),
		GPUs: spec.GetGpu().GetCount(), GPUModels: emptyIfNil(spec.GetGpu().GetModels()),
		CPUMillis: spec.GetCpuMillis(), MemoryMiB: spec.GetMemoryMib(), SHMMiB: spec.GetShmMib(), PIDsLimit: spec.GetPidsLimit(),
		Env: spec.GetEnv(), Origins: w.GetOrigins(), Pending: emptyIfNil(w.GetPending()),
		Login: w.GetLogin(), Sudo: w.GetSudo(), SSHHost: w.GetSshHost(), SSHPrincipal: w.GetSshPrincipal(),
		ReusedHome: w.GetReusedHome(), Version: w.GetVersion(), CreatedAt: momentOf(w.GetCreatedAt()),
		Volumes: []volumeMountView{}, Leases: []leaseView{}, Devices: []deviceView{}, Mounts: []mountView{},
	}
	if v.Env == nil {
		v.Env = map[string]string{}
	}
	if v.Origins == nil {
		v.Origins = map[string]string{}
	}
	v.addState(w)
	v.addParts(w)
	return v
}

func (v *workspaceView) addState(w *carrelv1.Workspace) {
	if r := w.GetReason(); r.GetCode() != "" || r.GetMessage() != "" {
		v.Reason = &reasonView{Code: r.GetCode(), Message: r.GetMessage(), ExitCode: r.ExitCode, LogTail: r.GetLogTail()}
	}
	if q := w.GetQueue(); q != nil {
		v.Queue = &queueView{Place: q.GetPlace(), Length: q.GetLength(), Why: q.GetWhy(), Since: momentOf(q.GetSince()), Reserved: q.GetReservedDevices()}
	}
	if p := w.GetPull(); p != nil {
		v.Pull = &pullView{Done: p.GetBytesDone(), Total: p.GetBytesTotal(), Phase: p.GetPhase()}
	}
	if r := w.GetRun(); r != nil {
		v.Run = &runView{
			Epoch: r.GetEpoch(), Host: r.GetHost(), Image: r.GetImageDigest(), QueuedAt: momentOf(r.GetQueuedAt()), PlacedAt: momentOf(r.GetPlacedAt()),
			StartedAt: momentOf(r.GetStartedAt()), ReadyAt: momentOf(r.GetReadyAt()), EndedAt: momentOf(r.GetEndedAt()),
		}
	}
	if d := w.GetIdleFor(); d != nil {
		s := int64(d.AsDuration() / time.Second)
		v.IdleSeconds = &s
	}
}

func (v *workspaceView) addParts(w *carrelv1.Workspace) {
	for _, m := range w.GetSpec().GetVolumes() {
		v.Volumes = append(v.Volumes, volumeMountView{m.GetVolume(), m.GetTarget(), m.GetReadOnly()})
	}
	for _, l := range w.GetLeases() {
		v.Leases = append(v.Leases, leaseView{
			ID: l.GetId(), Device: l.GetDeviceId(), Model: l.GetModel(), Host: l.GetHost(), Epoch: l.GetEpoch(),
			StartedAt: momentOf(l.GetStartedAt()), EndedAt: momentOf(l.GetEndedAt()), ReleasedAt: momentOf(l.GetReleasedAt()), Provisional: l.GetProvisional(),
		})
	}
	for _, d := range w.GetDevices() {
		v.Devices = append(v.Devices, viewDevice(d))
	}
	for _, m := range w.GetMounts() {
		v.Mounts = append(v.Mounts, mountView{m.GetVolumeId(), m.GetName(), m.GetTarget(), m.GetReadOnly(), m.GetHome()})
	}
}

func emptyIfNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// gpuText is what was asked for, in the form that `--gpu` takes.
func gpuText(count int32, models []string) string {
	switch {
	case count == 0:
		return "none"
	case len(models) == 0:
		return fmt.Sprint(count)
	default:
		return fmt.Sprintf("%s:%d", strings.Join(models, "|"), count)
	}
}

func cpuText(millis int64) string {
	if millis == 0 {
		return "-"
	}
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%d.%03d", millis/1000, millis%1000), "0"), ".")
}

// stateText is the state with what stands beside it.
func (v workspaceView) stateText() string {
	if v.UnreachableSince != nil {
		return v.State + " (host unreachable)"
	}
	if v.Queue != nil && v.State == "queued" && v.Queue.Place > 0 {
		return fmt.Sprintf("queued (%d of %d)", v.Queue.Place, v.Queue.Length)
	}
	return v.State
}

func (v workspaceView) color() string {
	switch {
	case v.UnreachableSince != nil, v.State == "failed":
		return output.Red
	case v.State == "running":
		return output.Green
	case v.State == "stopped", v.State == "deleted":
		return output.Dim
	default:
		return output.Yellow
	}
}

// note is the one thing worth a glance.
func (v workspaceView) note() string {
	switch {
	case v.UnreachableSince != nil:
		return "host does not answer since " + v.UnreachableSince.stamp()
	case v.Queue != nil && v.State == "queued":
		return v.Queue.Why
	case v.Reason != nil && (v.State == "failed" || v.State == "stopped"):
		return v.Reason.Message
	case v.State == "running" && v.IdleSeconds != nil && *v.IdleSeconds >= 60:
		return "GPU idle for " + output.Age(time.Duration(*v.IdleSeconds)*time.Second)
	case len(v.Pending) > 0:
		return "at the next restart: " + strings.Join(v.Pending, ", ")
	}
	return ""
}

// modelsHeld are the models of the devices that it holds now.
func (v workspaceView) modelsHeld() string {
	counts := map[string]int{}
	for _, d := range v.Devices {
		counts[d.Model]++
	}
	names := make([]string, 0, len(counts))
	for m := range counts {
		names = append(names, m)
	}
	sort.Strings(names)
	for i, m := range names {
		names[i] = fmt.Sprintf("%s:%d", m, counts[m])
	}
	return strings.Join(names, " ")
}

func (v workspaceView) gpus() string {
	if held := v.modelsHeld(); held != "" {
		return held
	}
	return gpuText(v.GPUs, v.GPUModels)
}

// workspaceList is how workspaces are listed.
func workspaceList(owners bool, now time.Time) output.List[workspaceView] {
	col := func(name, title string, text func(workspaceView) string) output.Column[workspaceView] {
		return output.Column[workspaceView]{Name: name, Title: title, Text: text}
	}
	state := col("state", "STATE", workspaceView.stateText)
	state.Value = func(v workspaceView) string { return v.State }
	state.Color = workspaceView.color
	gpus := col("gpus", "GPUS", workspaceView.gpus)
	gpus.Value = func(v workspaceView) string { return fmt.Sprint(v.GPUs) }
	created := col("created_at", "AGE", func(v workspaceView) string { return v.CreatedAt.ago(now) })
	created.Value = func(v workspaceView) string { return v.CreatedAt.text() }
	owner := col("owner", "", func(v workspaceView) string { return v.Owner })
	if owners {
		owner.Title = "OWNER"
	}
	return output.List[workspaceView]{
		Columns: []output.Column[workspaceView]{
			col("name", "NAME", func(v workspaceView) string { return v.Name }), owner, state, gpus,
			col("gpu_models", "", func(v workspaceView) string { return strings.Join(v.GPUModels, "|") }),
			col("pool", "POOL", func(v workspaceView) string { return v.Pool }),
			col("host", "HOST", func(v workspaceView) string { return orDash(v.Host) }),
			col("image", "IMAGE", func(v workspaceView) string { return v.Image }), created,
			col("project", "", func(v workspaceView) string { return v.Project }),
			col("id", "", func(v workspaceView) string { return v.ID }),
			col("note", "NOTE", workspaceView.note),
		},
		ID: func(v workspaceView) string {
			if owners {
				return v.Owner + "/" + v.Name
			}
			return v.Name
		},
		Empty: "no workspaces; `carrel up NAME` makes one",
	}
}
