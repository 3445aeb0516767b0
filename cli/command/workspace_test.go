package command_test

import (
	"encoding/csv"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/cli/command"
	"github.com/carrel-dev/carrel/cli/command/fakegateway"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

const (
	queued  = carrelv1.WorkspaceState_WORKSPACE_STATE_QUEUED
	pulling = carrelv1.WorkspaceState_WORKSPACE_STATE_PULLING
	failed  = carrelv1.WorkspaceState_WORKSPACE_STATE_FAILED
)

func TestUpShowsThePlanAndEndsWithTheSSHLine(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	r := m.run("up", "fraud", "--gpu", "4090|A100:2", "--memory", "64G")
	if r.code != 0 || strings.TrimSpace(r.out) != "ready: ssh fraud.carrel" {
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{"4090|A100:2", "64GiB", "host share per device", "at once on h1"} {
		if !strings.Contains(r.errOut, want) {
			t.Errorf("the plan does not say %q:\n%s", want, r.errOut)
		}
	}
	if got := hostLines(m.file(".ssh", "carrel", "config")); len(got) != 1 || got[0] != "fraud.carrel" {
		t.Errorf("ssh hosts: %v", got)
	}
}

func TestUpGoesThroughQueueAndPull(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.OnCreate = func(w *carrelv1.Workspace) {
		w.Queue = &carrelv1.QueuePlace{Place: 2, Length: 5, Why: "all 4 GPUs of pool default are in use", Since: timestamppb.Now()}
		w.ReusedHome = "fraud-home"
	}
	done := make(chan result)
	go func() { done <- m.run("up", "fraud") }()
	waitFor(t, "created", func() bool { return g.Workspace("ana", "fraud") != nil })
	g.Change("ana", "fraud", func(w *carrelv1.Workspace) {
		w.State, w.Queue = pulling, nil
		w.Pull = &carrelv1.PullProgress{BytesDone: 512 << 20, BytesTotal: 2 << 30, Phase: "downloading"}
	})
	waitFor(t, "watched", func() bool { return g.Calls(carrelv1connect.WorkspaceServicePlanProcedure) == 1 })
	g.Change("ana", "fraud", fakegateway.Run)
	r := <-done
	if r.code != 0 || !strings.Contains(r.out, "ready: ssh fraud.carrel") {
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{"place 2 of 5: all 4 GPUs of pool default are in use", "takes the kept volume fraud-home again"} {
		if !strings.Contains(r.errOut, want) {
			t.Errorf("no %q in:\n%s", want, r.errOut)
		}
	}
	if strings.Contains(r.out+r.errOut, "\x1b") {
		t.Error("escape sequences although there is no terminal")
	}
}

// CLI-11: Ctrl-C while waiting leaves a queued workspace queued, and says so and how to cancel.
func TestCtrlCSaysWhatItLeaves(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.OnCreate = func(w *carrelv1.Workspace) {
		w.Queue = &carrelv1.QueuePlace{Place: 1, Length: 1, Why: "all GPUs are in use"}
	}
	ctx, interrupt := command.Interrupted(t.Context())
	done := make(chan result)
	go func() { done <- m.runCtx(ctx, "up", "fraud") }()
	waitFor(t, "created", func() bool { return g.Workspace("ana", "fraud") != nil })
	interrupt()
	r := <-done
	if r.code != 130 || !strings.Contains(r.errOut, "fraud stays queued") || !strings.Contains(r.errOut, "carrel stop fraud") {
		t.Errorf("%+v", r)
	}
	if g.Workspace("ana", "fraud").GetState() != queued {
		t.Error("the workspace is not queued")
	}
}

func TestUpTellsWhyAWorkspaceFailed(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	one := int32(1)
	g.OnCreate = func(w *carrelv1.Workspace) {
		w.State = failed
		w.Reason = &carrelv1.Reason{Code: "exited", Message: "The container ended before it was ready; choose another image.", ExitCode: &one, LogTail: []string{"libfoo.so: \x1b[31mcannot open\x1b]0;x\x07"}}
	}
	r := m.fails(1, "choose another image (exit status 1)", "up", "fraud")
	if !strings.Contains(r.errOut, "| libfoo.so: cannot open\n") || r.out != "" {
		t.Errorf("%+v", r)
	}
}

func TestUpOnAnExistingNameStartsIt(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.ok("up", "fraud")
	m.ok("stop", "fraud")
	if out := m.ok("up", "fraud"); !strings.Contains(out, "ready: ssh fraud.carrel") {
		t.Errorf("up: %s", out)
	}
	if n := g.Calls(carrelv1connect.WorkspaceServiceCreateProcedure); n != 1 {
		t.Errorf("created %d times", n)
	}
	r := m.fails(5, "--memory is 64GiB, not 128GiB", "up", "fraud", "--memory", "128G", "--gpu", "1")
	if !strings.Contains(r.errOut, "--update") || strings.Contains(r.errOut, "--gpu is") {
		t.Errorf("%s", r.errOut)
	}
	m.ok("up", "fraud", "--memory", "128G", "--update")
	if got := g.Workspace("ana", "fraud").GetSpec().GetMemoryMib(); got != 128<<10 {
		t.Errorf("memory %d", got)
	}
	epoch := g.Workspace("ana", "fraud").GetRun().GetEpoch()
	m.fails(2, "-y", "up", "fraud", "--memory", "32G", "--recreate")
	m.ok("up", "fraud", "--memory", "32G", "--recreate", "-y")
	if got := g.Workspace("ana", "fraud").GetRun().GetEpoch(); got != epoch+1 {
		t.Errorf("epoch %d after %d", got, epoch)
	}
}

func TestUpDoesNotTakeAPrefixForTheName(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.ok("up", "fraud1")
	m.ok("up", "fraud")
	m.ok("up", "fraud2")
	m.ok("up", "frau")
	if got := strings.Fields(m.ok("ls", "-q")); strings.Join(got, " ") != "frau fraud fraud1 fraud2" {
		t.Errorf("workspaces: %v", got)
	}
}

func TestUpGoesOnAfterTheGatewayWasAway(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.OnCreate = func(*carrelv1.Workspace) {}
	done := make(chan result)
	go func() { done <- m.run("up", "fraud") }()
	waitFor(t, "created", func() bool { return g.Workspace("ana", "fraud") != nil })
	time.Sleep(50 * time.Millisecond) //nolint:forbidigo // most often within the watch; the outcome is the same otherwise
	g.Server.CloseClientConnections()
	g.Change("ana", "fraud", fakegateway.Run)
	select {
	case r := <-done:
		if r.code != 0 {
			t.Errorf("%+v", r)
		}
	case <-time.After(15 * time.Second):
		t.Fatal("does not come back")
	}
}

func TestListsAreStableInEveryFormat(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	for _, n := range []string{"w1", "w2", "w3", "w4"} {
		g.AddWorkspace("ana", n)
	}
	g.AddUser("bo")
	g.AddWorkspace("bo", "hidden")
	if got := strings.Fields(m.ok("ls", "-q")); strings.Join(got, " ") != "w1 w2 w3 w4" {
		t.Errorf("ls -q: %v", got)
	}
	var rows []map[string]any
	if err := json.Unmarshal([]byte(m.ok("ls", "-o", "json")), &rows); err != nil || len(rows) != 4 || rows[0]["state"] != "running" {
		t.Errorf("json: %v %v", rows, err)
	}
	records, err := csv.NewReader(strings.NewReader(m.ok("ls", "-o", "csv"))).ReadAll()
	if err != nil || len(records) != 5 || records[0][0] != "name" || records[4][0] != "w4" {
		t.Errorf("csv: %v %v", records, err)
	}
	if out := m.ok("ls", "-a", "-q"); !strings.Contains(out, "bo/hidden") {
		t.Errorf("ls -a: %s", out)
	}
	if out := newMachine(t).run("ls", "-o", "yaml"); out.code != 2 {
		t.Errorf("ls -o yaml: %+v", out)
	}
}

func TestEmptyListIsAnEmptyArray(t *testing.T) {
	m := signedIn(t, fakegateway.New(t), "ana")
	if out := strings.TrimSpace(m.ok("ls", "-o", "json")); out != "[]" {
		t.Errorf("json: %q", out)
	}
}

// CLI-12: an unknown state is shown by its number, and a missing procedure names both versions.
func TestNewerAndOlderGateways(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.AddWorkspace("ana", "w1")
	g.Change("ana", "w1", func(w *carrelv1.Workspace) { w.State = 9 })
	for _, args := range [][]string{{"ls"}, {"ls", "-o", "json"}, {"show", "w1"}, {"show", "w1", "-o", "json"}} {
		if out := m.ok(args...); !strings.Contains(out, "unknown(9)") {
			t.Errorf("%v: %s", args, out)
		}
	}
	g.Removed[carrelv1connect.UsageServiceListRatesProcedure] = true
	m.fails(1, "too new for this command: gateway v1.4.0, this carrel v1.3.0", "rate", "ls")
	m.sys.Version = "v1.5.0"
	m.fails(1, "too old for this command: gateway v1.4.0, this carrel v1.5.0", "rate", "ls")
	m.sys.Version = "dev"
	m.fails(1, "too old or too new", "rate", "ls")
	m.sys.Version = "v0.9.0"
	m.fails(1, "too old for the gateway", "login", g.AddUser("ana"))
	r := m.run("proxy", "--workspace", "w1")
	if r.out != "" {
		t.Errorf("proxy wrote to stdout: %q", r.out)
	}
}

// T-10: escape sequences of a server's strings do not reach the terminal.
func TestServerStringsCannotDriveTheTerminal(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.sys.OutTerminal, m.sys.ErrTerminal = true, true
	m.env["NO_COLOR"] = "1"
	evil := "\x1b]0;owned\x07\x1b[2J\u009b31m\u202etxt\r\nsecond"
	g.AddWorkspace("ana", "w1")
	g.Change("ana", "w1", func(w *carrelv1.Workspace) {
		w.Spec.Image, w.Reason, w.State = evil, &carrelv1.Reason{Code: "x", Message: evil, LogTail: []string{evil}}, failed
	})
	g.SetDevices(&carrelv1.Device{Id: evil, Host: evil, Model: evil, Health: "failed", HealthReason: evil, Sample: &carrelv1.DeviceSample{Processes: []*carrelv1.Process{{Pid: 7, Name: evil}}}})
	g.SetLogs(&carrelv1.LogLine{Text: evil, Time: timestamppb.Now(), Source: "container"})
	g.Fail[carrelv1connect.UsageServiceCheckProcedure] = connect.NewError(connect.CodeInternal, io.EOF)
	g.Fail[carrelv1connect.UsageServiceReportProcedure] = connect.NewError(connect.CodeInvalidArgument, evilError(evil))
	for _, args := range [][]string{{"ls"}, {"show", "w1"}, {"gpus"}, {"top"}, {"logs", "w1"}, {"usage"}, {"ls", "-o", "csv"}, {"ls", "-o", "json"}, {"usage", "check"}} {
		r := m.run(args...)
		for _, bad := range []string{"\x1b", "\x07", "\u009b", "\u202e", "\r"} {
			if args[len(args)-1] == "json" && bad != "\x1b" && bad != "\x07" && bad != "\r" {
				continue // JSON escapes what it must
			}
			if strings.Contains(r.out+r.errOut, bad) {
				t.Errorf("%v: %q in %q", args, bad, r.out+r.errOut)
			}
		}
	}
}

type evilError string

func (e evilError) Error() string { return string(e) }

func TestSettingsAreStrict(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(m.env["CARREL_CONFIG_DIR"], "config.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("up:\n  image: mine\n  cpus: 4\ntimeout:\n  request: 20s\n")
	m.ok("up", "w1", "-q")
	if s := g.Workspace("ana", "w1").GetSpec(); s.GetImage() != "mine" || s.GetCpuMillis() != 4000 {
		t.Errorf("spec: %v", s)
	}
	m.env["CARREL_UP_IMAGE"] = "fromenv"
	m.ok("up", "w2", "-q")
	m.ok("up", "w3", "-q", "--image", "flag")
	if a, b := g.Workspace("ana", "w2").GetSpec().GetImage(), g.Workspace("ana", "w3").GetSpec().GetImage(); a != "fromenv" || b != "flag" {
		t.Errorf("images %s, %s", a, b)
	}
	m.ok("up", "w1", "-q") // own defaults are no options asked for
	write("uo: 1\ntimeout:\n  request: -3s\noutput: yaml\n")
	r := m.fails(2, `unknown key "uo"`, "ls")
	if !strings.Contains(r.errOut, "timeout.request") || !strings.Contains(r.errOut, "output") {
		t.Errorf("not all faults: %s", r.errOut)
	}
}

func TestTokenFromTheEnvironment(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	token, err := os.ReadFile(m.deploymentFile("token"))
	if err != nil {
		t.Fatal(err)
	}
	ci := newMachine(t)
	ci.env["CARREL_TOKEN"] = strings.TrimSpace(string(token))
	ci.fails(2, "CARREL_GATEWAY", "ls")
	ci.env["CARREL_GATEWAY"] = g.Server.URL
	ci.ok("up", "w1")
	ci.fails(255, "carrel login", "ssh", "w1")
	ci.env["CARREL_GATEWAY"] = "http://lab.example"
	ci.fails(2, "plain http", "ls")
}

func TestTopShowsWhoLeaks(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	zero, used, half := int32(0), int64(20480), int64(10240)
	g.SetDevices(&carrelv1.Device{
		Id: "GPU-1", Host: "h1", Model: "4090", MemoryMib: 24576, Health: "ok", Workspace: "fraud", User: "ana", LeasedAt: timestamppb.Now(),
		Sample: &carrelv1.DeviceSample{UtilizationPercent: &zero, MemoryUsedMib: &used, Processes: []*carrelv1.Process{
			{Pid: 11, Name: "python", MemoryMib: &half, Workspace: "fraud", User: "ana"},
			{Pid: 12, Name: "stray", MemoryMib: &used},
		}},
	})
	out := m.ok("top")
	for _, want := range []string{"holds memory, idle", "not of a workspace", "20GiB/24GiB", "ana/fraud"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Index(out, "stray") > strings.Index(out, "python") {
		t.Errorf("not by memory:\n%s", out)
	}
}

func TestLogsResumeWithoutDoubles(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.AddWorkspace("ana", "w1")
	at := time.Now()
	g.SetLogs(
		&carrelv1.LogLine{Text: "one", Time: timestamppb.New(at), Source: "container"},
		&carrelv1.LogLine{Text: "two", Time: timestamppb.New(at), Source: "container"},
		&carrelv1.LogLine{Text: "running", Time: timestamppb.New(at.Add(-time.Second)), Source: "event"},
	)
	if out := m.ok("logs", "w1"); out != "one\ntwo\n-- running\n" {
		t.Errorf("%q", out)
	}
	if out := m.ok("logs", "-f", "--tail", "1", "w1"); out != "-- running\n" {
		t.Errorf("%q", out)
	}
	m.fails(4, "no workspace", "logs", "nope")
}

func TestUserImport(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.sys.In = strings.NewReader("name,uid,role,groups\nbo,1001,member,vision:20001\ncy,,admin,\n")
	out := m.ok("user", "import", "-", "-o", "csv")
	if !strings.Contains(out, "bo,http") || !strings.Contains(out, "cy,http") {
		t.Errorf("%s", out)
	}
	m.sys.In = strings.NewReader("name,uid,role\nbo,12,member\ncy,,boss\ncy,1,2,3\n")
	r := m.fails(2, "line 2: uid 12", "user", "import", "-")
	if !strings.Contains(r.errOut, "line 3: role") || !strings.Contains(r.errOut, "line 4") {
		t.Errorf("not all faults: %s", r.errOut)
	}
	m.sys.In = strings.NewReader("name\ntaken\ndi\n")
	m.fails(1, "1 of 2 accounts", "user", "import", "-", "--partial")
	m.sys.In = strings.NewReader("nome\nx\n")
	m.fails(2, "unknown column", "user", "import", "-")
}
