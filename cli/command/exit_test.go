package command_test

import (
	"encoding/csv"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/carrel-dev/carrel/cli/command/fakegateway"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

// lines is one command line of every verb that calls the gateway.
var lines = [][]string{
	{"ls"},
	{"ls", "-w"},
	{"show", "w1"},
	{"up", "w1"},
	{"start", "w1"},
	{"stop", "w1"},
	{"restart", "w1"},
	{"update", "w1", "--memory", "1G"},
	{"rm", "w1"},
	{"logs", "w1"},
	{"ssh", "w1"},
	{"exec", "w1", "--", "true"},
	{"proxy", "--workspace", "w1"},
	{"ssh-config"},
	{"gpus"},
	{"gpus", "-w"},
	{"gpus", "exclude", "GPU-1"},
	{"gpus", "include", "GPU-1"},
	{"top"},
	{"top", "w1"},
	{"usage"},
	{"usage", "check"},
	{"rate", "ls"},
	{"rate", "set", "4090", "0.5", "--currency", "EUR"},
	{"pool", "ls"},
	{"pool", "create", "p"},
	{"pool", "set", "p", "--sudo=false"},
	{"image", "ls"},
	{"image", "add", "a", "r/a:1"},
	{"image", "rm", "a"},
	{"volume", "ls"},
	{"volume", "rm", "v", "-y"},
	{"volume", "restore", "v"},
	{"host", "ls"},
	{"host", "token"},
	{"host", "drain", "h"},
	{"host", "fence", "h", "-y"},
	{"whoami"},
	{"token", "ls"},
	{"token", "revoke", "t"},
	{"key", "ls"},
	{"key", "revoke", "k"},
	{"user", "ls"},
	{"user", "add", "bo"},
	{"user", "set", "bo", "--role", "admin"},
	{"user", "disable", "bo"},
	{"user", "enable", "bo"},
	{"user", "sign-in", "bo"},
	{"project", "ls"},
	{"project", "create", "p"},
	{"logout"},
}

// viaSSH are the verbs whose own failures are 255, as ssh's are.
func viaSSH(args []string) bool {
	return slices.Contains([]string{"ssh", "exec", "proxy"}, args[0])
}

func check(t *testing.T, m *machine, args []string, code int, want string) {
	t.Helper()
	if viaSSH(args) {
		code = 255
	}
	begin := time.Now()
	r := m.fails(code, want, args...)
	if r.out != "" {
		t.Errorf("%q: stdout %q", args, r.out)
	}
	if strings.Count(r.errOut, "\n") != 1 || !strings.HasPrefix(r.errOut, "carrel: ") {
		t.Errorf("%q: not one line: %q", args, r.errOut)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("%q took %v", args, d)
	}
}

// CLI-01: each verb with each failure: the right code, nothing on stdout, one line on stderr.
func TestEveryVerbFailsAsDocumented(t *testing.T) {
	fresh := newMachine(t)
	for _, args := range lines {
		check(t, fresh, args, 3, "carrel login LINK")
	}
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.env["CARREL_TIMEOUT_RECONNECT"] = "1ms"
	for name, c := range map[string]struct {
		code connect.Code
		exit int
	}{"forbidden": {connect.CodePermissionDenied, 3}, "limit": {connect.CodeResourceExhausted, 5}, "internal": {connect.CodeInternal, 1}} {
		t.Run(name, func(t *testing.T) {
			for _, p := range procedures() {
				g.Fail[p] = connect.NewError(c.code, evilError("said by the gateway"))
			}
			for _, args := range lines {
				if slices.Contains(args, "-w") || args[0] == "logs" {
					continue // streams do not pass the fake's gate
				}
				check(t, m, args, c.exit, "said by the gateway")
			}
			clear(g.Fail)
		})
	}
	g.RevokeTokens("ana")
	for _, args := range lines {
		if args[0] == "logout" || slices.Equal(args, []string{"gpus", "-w"}) {
			continue
		}
		check(t, m, args, 3, "carrel login "+g.Server.URL)
	}
	g.Server.Close()
	var wg sync.WaitGroup // each tries again for a second
	for _, args := range lines {
		wg.Go(func() { check(t, m, args, 6, "not reached") })
	}
	wg.Wait()
}

func procedures() []string {
	return []string{
		carrelv1connect.WorkspaceServiceListProcedure, carrelv1connect.WorkspaceServiceGetProcedure, carrelv1connect.WorkspaceServiceStartProcedure, carrelv1connect.WorkspaceServiceStopProcedure,
		carrelv1connect.AttachServiceSshConfigProcedure, carrelv1connect.AttachServiceCreateTicketProcedure, carrelv1connect.DeviceServiceListProcedure, carrelv1connect.DeviceServiceSetExcludedProcedure,
		carrelv1connect.UsageServiceReportProcedure, carrelv1connect.UsageServiceCheckProcedure, carrelv1connect.UsageServiceListRatesProcedure, carrelv1connect.UsageServiceSetRateProcedure,
		carrelv1connect.PoolServiceListProcedure, carrelv1connect.PoolServiceCreateProcedure, carrelv1connect.PoolServiceUpdateProcedure,
		carrelv1connect.ImageServiceListProcedure, carrelv1connect.ImageServiceAddProcedure, carrelv1connect.ImageServiceRemoveProcedure,
		carrelv1connect.VolumeServiceListProcedure, carrelv1connect.VolumeServiceDeleteProcedure, carrelv1connect.VolumeServiceRestoreProcedure,
		carrelv1connect.HostServiceListProcedure, carrelv1connect.HostServiceCreateJoinTokenProcedure, carrelv1connect.HostServiceSetDrainingProcedure, carrelv1connect.HostServiceFenceProcedure,
		carrelv1connect.AuthServiceWhoAmIProcedure, carrelv1connect.AuthServiceListTokensProcedure, carrelv1connect.AuthServiceRevokeTokenProcedure, carrelv1connect.AuthServiceSignOutProcedure,
		carrelv1connect.AuthServiceListDeviceKeysProcedure, carrelv1connect.AuthServiceRevokeDeviceKeyProcedure,
		carrelv1connect.UserServiceListProcedure, carrelv1connect.UserServiceAddProcedure, carrelv1connect.UserServiceUpdateProcedure, carrelv1connect.UserServiceCreateSignInProcedure,
		carrelv1connect.UserServiceListProjectsProcedure, carrelv1connect.UserServiceCreateProjectProcedure,
	}
}

func TestBadUsageIsTwo(t *testing.T) {
	m := signedIn(t, fakegateway.New(t), "ana")
	for _, args := range [][]string{
		{"bogus"},
		{"sl"},
		{"pool"},
		{"pool", "bogus"},
		{"ls", "extra"},
		{"ls", "--bogus"},
		{"ls", "-o", "yaml"},
		{"show"},
		{"show", "a", "b"},
		{"up"},
		{"update", "w1"},
		{"up", "w", "--gpu", "-1"},
		{"up", "w", "--gpu", "1000000"},
		{"up", "w", "--gpu", "4090:x"},
		{"up", "w", "--gpu", ":2"},
		{"up", "w", "--gpu", "a b"},
		{"up", "w", "--gpu", "A:2000"},
		{"up", "w", "--gpu", "|:1"},
		{"up", "w", "--memory", "64"},
		{"up", "w", "--memory", "-1G"},
		{"up", "w", "--memory", "0G"},
		{"up", "w", "--memory", "lots"},
		{"up", "w", "--cpus", "0"},
		{"up", "w", "--cpus", "NaN"},
		{"up", "w", "--pids", "0"},
		{"up", "w", "-e", "A"},
		{"up", "w", "-e", "1A=b"},
		{"up", "w", "--volume", "data"},
		{"up", "w", "--volume", "data:rel"},
		{"up", "w", "--volume", "d:/a/../b"},
		{"up", "w", "--volume", "d:/a:rx"},
		{"up", "w", "--volume", "a:/x", "--volume", "b:/x"},
		{"up", "w", "--update", "--recreate"},
		{"up", "w", "-o", "csv"},
		{"stop", "w", "--grace", "-1s"},
		{"logs", "w", "--tail", "-1"},
		{"usage", "--by", "colour"},
		{"rate", "set", "a", "-1"},
		{"rate", "set", "a", "1.1234567"},
		{"host", "token", "--ttl", "2h"},
		{"user", "add", "bo", "--uid", "12"},
		{"user", "add", "bo", "--role", "boss"},
		{"user", "add", "bo", "--group", "x"},
		{"user", "set", "bo"},
		{"pool", "set", "p"},
		{"pool", "create", "p", "--max-gpus", "-1"},
		{"key", "add", "/nonexistent"},
		{"ssh-config", "--ssh-option", "User root"},
	} {
		r := m.run(args...)
		if r.code != 2 || r.out != "" || strings.Count(r.errOut, "\n") != 1 {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

// CLI-15: dates are read in one zone, bad ones are refused with the accepted forms, and the formats agree.
func TestUsageWindows(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	now := time.Date(2026, 3, 15, 16, 10, 0, 0, time.UTC) // 00:10 on the 16th in Asia/Shanghai
	m.sys.Now = func() time.Time { return now }
	for _, args := range [][]string{
		{"--from", "2026-02-30"},
		{"--from", "2026-13-01"},
		{"--from", "2026-03-01", "--to", "2026-02-01"},
		{"--from", "2026-03-01", "--to", "2026-03-01"},
		{"--from", "tomorrow"},
		{"--month", "2026-2"},
		{"--month", "2026-13"},
		{"--day", "2026-02-29"},
		{"--tz", "Mars/X"},
		{"--tz", "+5"},
		{"--tz", "../../etc/passwd"},
		{"--tz", "Local"},
		{"--month", "2026-02", "--from", "2026-02-01"},
		{"--from", "2027-01-01"},
	} {
		r := m.run(append([]string{"usage"}, args...)...)
		if r.code != 2 || r.out != "" {
			t.Errorf("%q: %+v", args, r)
		}
	}
	m.fails(2, "YYYY-MM-DDTHH:MM", "usage", "--from", "tomorrow")
	for want, args := range map[string][]string{
		"from 2026-03-16T00:00:00+08:00 to 2026-03-17T00:00:00+08:00 (Asia/Shanghai)": {"--day", "2026-03-16", "--tz", "Asia/Shanghai"},
		"from 2026-03-01T00:00:00+01:00 to 2026-04-01T00:00:00+02:00 (Europe/Berlin)": {"--month", "2026-03", "--tz", "Europe/Berlin"},
		"from 2026-03-01T10:30:00+01:00 to 2026-03-02T00:00:00+01:00 (Europe/Berlin)": {"--from", "2026-03-01T10:30", "--to", "2026-03-02", "--tz", "Europe/Berlin"},
		"from 2026-03-01T02:00:00Z to 2026-03-02T00:00:00Z (UTC)":                     {"--from", "2026-03-01T03:00:00+01:00", "--to", "2026-03-02", "--tz", "UTC"},
	} {
		if r := m.run(append([]string{"usage"}, args...)...); r.code != 0 || !strings.Contains(r.errOut, want) {
			t.Errorf("%q: %+v, want %q", args, r, want)
		}
	}
	table := m.ok("usage")
	records, err := csv.NewReader(strings.NewReader(m.ok("usage", "-o", "csv"))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var report struct {
		Rows []struct {
			Key      string `json:"key"`
			GPUMs    int64  `json:"gpu_ms"`
			GPUHours string `json:"gpu_hours"`
		} `json:"rows"`
		Total struct {
			GPUMs int64 `json:"gpu_ms"`
		} `json:"total"`
	}
	if err := json.Unmarshal([]byte(m.ok("usage", "-o", "json")), &report); err != nil {
		t.Fatal(err)
	}
	if len(records) != 3 || records[1][0] != "ana" || records[1][1] != "7200123" || report.Rows[0].GPUMs != 7200123 || report.Total.GPUMs != 7200483 {
		t.Errorf("csv %v, json %+v", records, report)
	}
	if !strings.Contains(table, report.Rows[0].GPUHours) || records[1][2] != report.Rows[0].GPUHours {
		t.Errorf("%s: no %s; csv %s", table, report.Rows[0].GPUHours, records[1][2])
	}
	r := m.run("usage", "check")
	if r.code != 1 || !strings.Contains(r.out, "4 ms too long") {
		t.Errorf("check: %+v", r)
	}
}

// CLI-11: what cannot be had is refused at once with the gateway's own words.
func TestImpossibleRequestsFailAtOnce(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.Fail[carrelv1connect.WorkspaceServicePlanProcedure] = connect.NewError(connect.CodeInvalidArgument, evilError("no host of pool default has 5 GPUs; the largest has 4"))
	begin := time.Now()
	m.fails(2, "the largest has 4", "up", "w1", "--gpu", "5")
	if d := time.Since(begin); d > 2*time.Second {
		t.Errorf("took %v", d)
	}
}

func TestDoctor(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	m.env["CARREL_SSH_CONFIG"] = m.dir + "/ssh config"
	m.ok("up", "w1", "-q")
	m.ok("ssh-config")
	out := m.ok("doctor")
	for _, code := range []string{"config", "gateway", "version", "clock-skew", "sign-in", "ssh-client", "ssh-include", "ssh-effective"} {
		if !strings.Contains(out, code) {
			t.Errorf("no %s in\n%s", code, out)
		}
	}
	m.env["HTTPS_PROXY"] = "http://me:secret@proxy:3128"
	m.sys.Now = func() time.Time { return time.Now().Add(-time.Hour) }
	out = m.ok("doctor")
	if !strings.Contains(out, "clock is -1h0m") || strings.Contains(out, "secret") || !strings.Contains(out, "proxy-env") {
		t.Errorf("%s", out)
	}
	g.Server.Close()
	r := m.run("doctor", "-o", "json")
	if r.code != 1 || !strings.Contains(r.out, `"fail"`) {
		t.Errorf("%+v", r)
	}
}
