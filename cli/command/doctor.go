package command

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	"github.com/carrel-dev/carrel/cli/sshconfig"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const (
	maxSkew = 2 * time.Minute // more than this makes sign-ins and certificates seem too old or too new
	// oldestSSH is the first release that knows all that the managed file uses (`Ciphers ^`, 8.1 as Windows ships it).
	oldestSSH = 8.1
)

// finding is one check of `doctor`; code is stable.
type finding struct {
	Code   string `json:"code"`
	Status string `json:"status"` // ok, warn, fail
	Text   string `json:"text"`
	Fix    string `json:"fix,omitempty"`
}

func newDoctor(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check configuration, gateway, sign-in, ssh and proxies, and say what to do", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			d := &doctor{a: a}
			d.run(cmd.Context())
			if err := writeList(a, findingList(), d.found, o); err != nil {
				return err
			}
			for _, f := range d.found {
				if f.Status == "fail" {
					return said(exitFailure)
				}
			}
			return nil
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func findingList() output.List[finding] {
	type col = output.Column[finding]
	return output.List[finding]{
		Columns: []col{
			{Name: "status", Title: "STATUS", Text: func(f finding) string { return f.Status }, Color: func(f finding) string {
				return map[string]string{"ok": output.Green, "warn": output.Yellow, "fail": output.Red}[f.Status]
			}},
			{Name: "code", Title: "CHECK", Text: func(f finding) string { return f.Code }},
			{Name: "text", Title: "FOUND", Text: func(f finding) string { return f.Text }},
			{Name: "fix", Title: "DO", Text: func(f finding) string { return f.Fix }},
		},
		ID: func(f finding) string { return f.Code },
	}
}

type doctor struct {
	a     *app
	found []finding
}

func (d *doctor) add(code, status, text, fix string) {
	d.found = append(d.found, finding{code, status, output.Line(text), output.Line(fix)})
}

func (d *doctor) run(ctx context.Context) {
	d.proxies()
	d.sshClient(ctx)
	api, err := d.a.connect()
	if err != nil {
		d.add("config", "fail", message(err), "see the text on the left")
		return
	}
	d.add("config", "ok", fmt.Sprintf("deployment %s at %s, in %s", api.dep.Name, api.dep.Gateway, d.a.dir), "")
	d.permissions(api)
	if d.gateway(ctx, api) {
		d.signIn(ctx, api)
	}
	d.sshFiles(ctx, api)
}

// proxies tells what the environment says about HTTP proxies.
func (d *doctor) proxies() {
	var set []string
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"} {
		if v := d.a.sys.Getenv(name); v != "" {
			set = append(set, name+"="+withoutPassword(v))
		}
	}
	if len(set) > 0 {
		d.add("proxy-env", "ok", "calls and ssh both follow "+strings.Join(set, " "), "")
	}
}

var userInfo = regexp.MustCompile(`//[^/@]*@`)

func withoutPassword(s string) string { return userInfo.ReplaceAllString(s, "//...@") }

func (d *doctor) permissions(api *api) {
	if !api.dep.Stored() || runtime.GOOS == "windows" {
		return
	}
	for _, path := range []string{api.dep.TokenPath(), api.dep.KeyPath()} {
		info, err := os.Lstat(path)
		switch {
		case err != nil:
			d.add("permissions", "fail", message(err), "sign in again: carrel login LINK")
		case info.Mode()&os.ModeSymlink != 0:
			d.add("permissions", "fail", path+" is a symbolic link", "remove it and sign in again")
		case info.Mode().Perm()&0o077 != 0:
			d.add("permissions", "fail", fmt.Sprintf("%s can be read by others (mode %o)", path, info.Mode().Perm()), "chmod 600 "+sshconfig.QuoteShell(path))
		default:
			continue
		}
		return
	}
	d.add("permissions", "ok", "token and key are for you alone", "")
}

// gateway checks reachability, versions and clocks, and reports whether the gateway answers.
func (d *doctor) gateway(ctx context.Context, api *api) bool {
	before := d.a.sys.Now()
	resp, err := api.auth.ServerInfo(ctx, connect.NewRequest(&carrelv1.ServerInfoRequest{}))
	after := d.a.sys.Now()
	if err != nil {
		err = api.rpcError(ctx, err)
		d.add("gateway", "fail", strings.TrimSuffix(message(err), "; `carrel doctor` looks closer"), "ask your admin whether the gateway runs; check the network and the proxy settings")
		return false
	}
	d.add("gateway", "ok", fmt.Sprintf("answers in %d ms", after.Sub(before).Milliseconds()), "")
	d.versions(resp.Msg)
	d.clock(resp.Header(), before, after)
	return true
}

func (d *doctor) versions(info *carrelv1.ServerInfoResponse) {
	text := fmt.Sprintf("gateway %s, this carrel %s", info.GetVersion(), d.a.sys.Version)
	if older, known := newerVersion(info.GetMinClientVersion(), d.a.sys.Version); known && older {
		d.add("version", "fail", text+", which needs "+info.GetMinClientVersion()+" or newer", "update carrel")
		return
	}
	d.add("version", "ok", text, "")
}

func (d *doctor) clock(h http.Header, before, after time.Time) {
	at, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		return // a proxy may take the header out
	}
	skew := before.Add(after.Sub(before) / 2).Sub(at.Add(500 * time.Millisecond)) // Date has whole seconds
	if skew.Abs() > maxSkew {
		d.add("clock-skew", "warn", fmt.Sprintf("this machine's clock is %v from the gateway's", skew.Round(time.Second)), "set the clock (NTP); ssh refuses certificates that seem too old or too new")
		return
	}
	d.add("clock-skew", "ok", "clocks agree", "")
}

func (d *doctor) signIn(ctx context.Context, api *api) {
	resp, err := api.auth.WhoAmI(ctx, connect.NewRequest(&carrelv1.WhoAmIRequest{}))
	if err != nil {
		d.add("sign-in", "fail", message(err), "carrel login LINK")
		return
	}
	text := "signed in as " + resp.Msg.GetUser().GetName()
	ends := momentOf(resp.Msg.GetToken().GetExpiresAt())
	if ends == nil {
		d.add("sign-in", "ok", text, "")
		return
	}
	if left := ends.Sub(d.a.sys.Now()); left < 7*24*time.Hour {
		d.add("sign-in", "warn", fmt.Sprintf("%s; the token ends in %s", text, output.Age(left)), "ask for another sign-in link")
		return
	}
	d.add("sign-in", "ok", text+" until "+ends.stamp(), "")
}

var sshVersion = regexp.MustCompile(`OpenSSH(?:_for_Windows)?_([0-9]+\.[0-9]+)`)

func (d *doctor) sshClient(ctx context.Context) {
	out, err := d.a.sys.Output(ctx, []string{"ssh", "-V"})
	if err != nil {
		d.add("ssh-client", "fail", "ssh was not found: "+message(err), "install OpenSSH's client")
		return
	}
	m := sshVersion.FindStringSubmatch(out)
	if m == nil {
		d.add("ssh-client", "warn", "an ssh that is not OpenSSH: "+out, "carrel is tried with OpenSSH only")
		return
	}
	if v, err := strconv.ParseFloat(m[1], 64); err == nil && v < oldestSSH {
		d.add("ssh-client", "fail", "OpenSSH "+m[1]+" is too old", fmt.Sprintf("install OpenSSH %.1f or newer", oldestSSH))
		return
	}
	d.add("ssh-client", "ok", "OpenSSH "+m[1], "")
}

// sshFiles asks ssh itself whether the managed hosts are in force.
func (d *doctor) sshFiles(ctx context.Context, api *api) {
	if !api.dep.Stored() {
		return
	}
	place, err := d.a.place()
	if err != nil {
		d.add("ssh-include", "fail", message(err), "")
		return
	}
	included, err := place.Included()
	if err != nil || !included {
		d.add("ssh-include", "warn", place.User+" does not include the managed hosts at its top", "carrel ssh-config")
		return
	}
	d.add("ssh-include", "ok", place.User+" includes "+place.Managed, "")
	entries, _, _, err := d.a.renderSSH()
	if err != nil {
		d.add("ssh-hosts", "fail", message(err), "carrel ssh-config")
		return
	}
	d.clashes(place, entries)
	for _, e := range entries {
		if e.Deployment == api.dep.Name {
			d.effective(ctx, place, e)
			return // one is as good as all: they differ only in names
		}
	}
}

func (d *doctor) clashes(place sshconfig.Place, entries []sshconfig.Entry) {
	names := place.Names()
	for _, e := range entries {
		if line, ok := names[e.Host.Workspace+sshconfig.Suffix]; ok {
			d.add("ssh-clash", "warn", fmt.Sprintf("%s has a host %s%s of its own (line %d)", place.User, e.Host.Workspace, sshconfig.Suffix, line), "the workspace is "+e.Alias)
		}
	}
}

func (d *doctor) effective(ctx context.Context, place sshconfig.Place, e sshconfig.Entry) {
	argv := []string{"ssh", "-G"}
	if !place.Default {
		argv = append(argv, "-F", place.User)
	}
	out, err := d.a.sys.Output(ctx, append(argv, e.Alias))
	if err != nil {
		d.add("ssh-effective", "fail", "ssh does not take the configuration: "+strings.TrimSpace(out), "mend what ssh names")
		return
	}
	want := map[string]string{"hostkeyalias": e.Host.Principal, "user": e.Host.Login, "stricthostkeychecking": "true"}
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if w, ok := want[key]; ok && w == value {
			delete(want, key)
		}
	}
	for key := range want {
		d.add("ssh-effective", "fail", fmt.Sprintf("for %s ssh uses another %s than carrel wrote", e.Alias, key), "carrel ssh-config")
		return
	}
	d.add("ssh-effective", "ok", "ssh takes "+e.Alias+" as carrel wrote it", "")
}
