package link

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"reflect"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/host"
	agentv1 "github.com/carrel-dev/carrel/gen/go/carrel/agent/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/agent/v1/agentv1connect"
)

// fill sets every field of a message, of lists and maps one entry.
func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("K").MapKey(), protoreflect.ValueOfString("v"))
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			fill(m.Mutable(f).List().AppendMutable().Message())
		case f.IsList():
			m.Mutable(f).List().Append(scalar(f))
		case f.Kind() == protoreflect.MessageKind:
			fill(m.Mutable(f).Message())
		default:
			m.Set(f, scalar(f))
		}
	}
}

func scalar(f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(string(f.Name()))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("b"))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(f.Number()))
	default:
		return protoreflect.ValueOfInt64(int64(f.Number()))
	}
}

// zeros lists the fields of a value that are zero.
func zeros(path string, v reflect.Value) []string {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			break
		}
		var out []string
		for i := range v.NumField() {
			out = append(out, zeros(path+"."+v.Type().Field(i).Name, v.Field(i))...)
		}
		return out
	case reflect.Slice:
		if v.Len() > 0 && v.Index(0).Kind() == reflect.Struct {
			return zeros(path+"[0]", v.Index(0))
		}
	default:
	}
	if v.IsZero() {
		return []string{path}
	}
	return nil
}

// unset lists the fields of a message that are not set.
func unset(path string, m protoreflect.Message) []string {
	var out []string
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := path + "." + string(f.Name())
		switch {
		case !m.Has(f):
			out = append(out, name)
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			out = append(out, unset(name, m.Get(f).List().Get(0).Message())...)
		case !f.IsList() && !f.IsMap() && f.Kind() == protoreflect.MessageKind && m.Get(f).Message().Descriptor().ParentFile().Package() != "google.protobuf":
			out = append(out, unset(name, m.Get(f).Message())...)
		}
	}
	return out
}

func TestNothingOfASetIsLost(t *testing.T) {
	req := &agentv1.ApplyRequest{}
	fill(req.ProtoReflect())
	set, err := setOf(req)
	if err != nil {
		t.Fatal(err)
	}
	// A mount of one kind has nothing of the other.
	want := fmt.Sprint([]string{"set.Runs[0].Mounts[0].HostPath"})
	if got := fmt.Sprint(zeros("set", reflect.ValueOf(set))); got != want {
		t.Errorf("lost: %s, want only %s", got, want)
	}
	req.Runs[0].Mounts[0].Kind = agentv1.MountKind_MOUNT_KIND_DECLARED
	if set, err = setOf(req); err != nil || set.Runs[0].Mounts[0].Volume != "" || set.Runs[0].Mounts[0].HostPath == "" {
		t.Errorf("declared: %+v, %v", set.Runs[0].Mounts, err)
	}
	req.Runs[0].Desired, req.Runs[0].Mounts[0].Kind = 0, 0
	if set, err = setOf(req); err != nil || set.Runs[0].Goal != "" || set.Runs[0].Mounts[0].HostPath+set.Runs[0].Mounts[0].Volume != "" {
		t.Errorf("nothing given: %+v, %v", set.Runs[0], err)
	}
	if stampOf(req.GetStamp()) != (host.Stamp{Database: 1, Session: 2, Generation: 3}) || !proto.Equal(stampProto(stampOf(req.GetStamp())), req.GetStamp()) {
		t.Errorf("stamp %v", stampOf(req.GetStamp()))
	}
	req.Stamp = nil
	if _, err := setOf(req); host.KindOf(err) != host.KindInvalid {
		t.Errorf("without stamp: %v", err)
	}
}

func second(n int) *time.Duration {
	d := time.Duration(n) * time.Second
	return &d
}

func TestNothingOfAReportIsLost(t *testing.T) {
	code := 3
	b := host.Batch{
		Seq: 7, Complete: true, JournalID: "j", VolumesRemoved: []string{"v"},
		Runs: []host.Observed{{
			Key: host.Key{Workspace: "w", Epoch: 2}, Phase: host.PhaseReady, ContainerID: "c", StartedAge: second(3), ReadyAge: second(2), EndedAge: second(1),
			EndedUnattested: true, ExitCode: &code, OutOfMemory: true, Reason: host.Reason{Code: "exited", Message: "m\xff"}, LogTail: []string{"l\xff"},
			PullDone: 1, PullTotal: 2, Sudo: "yes", ImageDigest: "d", EngineSilent: second(4),
		}},
		Facts: &host.Facts{
			BootID: "b", AgentVersion: "1", EngineVersion: "2", OS: "o", CPUs: 1, MemoryMiB: 1, DiskFreeMiB: 1, GPUSource: "nvml", DriverVersion: "d", CUDAVersion: "c",
			Problems: []string{"p"}, Clock: time.Now(), ReservedCPUMillis: 1, ReservedMemoryMiB: 1,
			Unmanaged: []host.Unmanaged{{Name: "n", Key: host.Key{Workspace: "w", Epoch: 1}, Devices: []string{"d"}, Running: true}},
			Devices: []host.Device{{Device: gpu.Device{
				UUID: "u", Index: 1, Kind: gpu.KindMIGInstance, Model: "m", ModelKey: "k", MemoryMiB: 1, ComputeCapability: "9.0", PCIBusID: "p", Parent: "q", Simulated: true,
			}, State: "failed", Reason: "r"}},
		},
	}
	got := batchProto(b)
	if left := unset("batch", got.ProtoReflect()); len(left) != 0 {
		t.Errorf("lost: %v", left)
	}
	if got.GetFacts().GetDevices()[0].GetKind() != "mig" || got.GetRuns()[0].GetPhase() != agentv1.RunPhase_RUN_PHASE_READY {
		t.Errorf("%v", got)
	}
	if _, err := proto.Marshal(got); err != nil {
		t.Errorf("what others wrote breaks the message: %v", err)
	}
	now := time.Now()
	s := sampleProto([]host.DeviceReading{{Age: time.Second, Sample: gpu.Sample{
		UUID: "u", UtilisationPct: gpu.Metric{State: gpu.Stale, Value: 5}, MemoryUsedMiB: gpu.FreshMetric(6, now), PowerW: gpu.FreshMetric(7, now), TemperatureC: gpu.FreshMetric(8, now),
		Processes: []gpu.Process{{PID: 9, Name: "p", MemoryMiB: 10, Type: gpu.Graphics, Workspace: "w/4"}},
	}}}, []host.RunReading{{Key: host.Key{Workspace: "w", Epoch: 1}, Usage: host.Usage{CPU: time.Second, MemoryBytes: 5}}})
	if left := unset("sample", s.ProtoReflect()); len(left) != 0 {
		t.Errorf("lost: %v", left)
	}
	none := readingProto(&host.DeviceReading{Sample: gpu.FailedSample("u", "hangs", now)})
	if none.UtilizationPercent != nil || none.MemoryUsedMib != nil || !none.GetStale() {
		t.Errorf("what is not known is told: %v", none)
	}
}

func TestEveryPhaseHasAWord(t *testing.T) {
	for _, p := range []host.Phase{host.PhasePulling, host.PhaseStarting, host.PhaseReady, host.PhaseStopping, host.PhaseGone} {
		if phaseProto(p) == agentv1.RunPhase_RUN_PHASE_UNSPECIFIED {
			t.Errorf("%s has none", p)
		}
	}
}

// answers is a machine whose answers a test sets.
type answers struct {
	Machine
	err   error
	lines int
}

func (a answers) Apply(context.Context, host.Stamp, host.Set) (host.Stamp, error) {
	return host.Stamp{}, a.err
}

func (a answers) Logs(_ context.Context, _ host.Key, _ host.LogQuery, each func(time.Time, string) error) error {
	for i := range a.lines {
		if err := each(time.Unix(int64(i), 0), fmt.Sprint(i)); err != nil {
			return err
		}
	}
	return a.err
}

func client(t *testing.T, s *HostService) agentv1connect.HostServiceClient {
	t.Helper()
	server := httptest.NewServer(s.Handler())
	t.Cleanup(server.Close)
	return agentv1connect.NewHostServiceClient(server.Client(), server.URL)
}

func TestCodes(t *testing.T) {
	for kind, code := range map[host.Kind]connect.Code{
		host.KindInvalid: connect.CodeInvalidArgument, host.KindStale: connect.CodeFailedPrecondition, host.KindNotFound: connect.CodeNotFound,
		host.KindConflict: connect.CodeAborted, host.KindUnavailable: connect.CodeUnavailable, host.KindNoSpace: connect.CodeResourceExhausted,
		host.KindDenied: connect.CodePermissionDenied, host.KindStalled: connect.CodeUnavailable, host.KindInternal: connect.CodeInternal,
	} {
		c := client(t, &HostService{Machine: answers{err: host.Errorf(kind, "why")}})
		_, err := c.Apply(t.Context(), connect.NewRequest(&agentv1.ApplyRequest{Stamp: &agentv1.Stamp{}}))
		if connect.CodeOf(err) != code {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestLogsKeepOrderAndEnd(t *testing.T) {
	const lines = 1001
	c := client(t, &HostService{Machine: answers{lines: lines, err: host.Errorf(host.KindUnavailable, "cut")}})
	s, err := c.Logs(t.Context(), connect.NewRequest(&agentv1.LogsRequest{Workspace: "w", Epoch: 1}))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for s.Receive() {
		for i, line := range s.Msg().GetLines() {
			if line != fmt.Sprint(n) || s.Msg().GetTimes()[i].GetSeconds() != int64(n) {
				t.Fatalf("line %d is %q of %v", n, line, s.Msg().GetTimes()[i])
			}
			n++
		}
	}
	if n != lines || connect.CodeOf(s.Err()) != connect.CodeUnavailable {
		t.Errorf("%d lines, %v", n, s.Err())
	}
}

func TestDialBackBounds(t *testing.T) {
	asked := 0
	s := &HostService{DialBackFunc: func(n int) error { asked += n; return errors.New("no link") }}
	c := client(t, s)
	for n, code := range map[int32]connect.Code{0: connect.CodeInvalidArgument, 65: connect.CodeInvalidArgument, -1: connect.CodeInvalidArgument, 64: connect.CodeUnavailable} {
		if _, err := c.DialBack(t.Context(), connect.NewRequest(&agentv1.DialBackRequest{Count: n})); connect.CodeOf(err) != code {
			t.Errorf("%d: %v", n, err)
		}
	}
	if asked != 64 {
		t.Errorf("%d asked for", asked)
	}
}
