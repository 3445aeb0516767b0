package command_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/cli/command/fakegateway"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

func (m *machine) deploymentFile(name string) string {
	return filepath.Join(m.env["CARREL_CONFIG_DIR"], "deployments", fakegateway.Deployment, name)
}

func TestLoginKeepsTokenAndKeyForTheOwnerAlone(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		old := setUmask(umask)
		g := fakegateway.New(t)
		m := newMachine(t)
		r := m.run("login", g.AddUser("ana"))
		setUmask(old)
		if r.code != 0 {
			t.Fatalf("login: %+v", r)
		}
		for _, f := range []string{"token", "id_ed25519"} {
			info, err := os.Lstat(m.deploymentFile(f))
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode().Perm() != 0o600 {
				t.Errorf("umask %o: %s has mode %o", umask, f, info.Mode().Perm())
			}
		}
		if info, err := os.Stat(filepath.Dir(m.deploymentFile("token"))); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("umask %o: directory %v %v", umask, info.Mode(), err)
		}
		if len(g.Keys("ana")) != 1 {
			t.Errorf("keys registered: %v", g.Keys("ana"))
		}
		if strings.Contains(r.out+r.errOut, "sign-in=") {
			t.Errorf("the code stands in the output: %s%s", r.out, r.errOut)
		}
	}
}

func TestLoginRefusesASymlinkInTheTokensPlace(t *testing.T) {
	g := fakegateway.New(t)
	m := newMachine(t)
	elsewhere := filepath.Join(m.dir, "elsewhere")
	if err := os.MkdirAll(filepath.Dir(m.deploymentFile("token")), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, m.deploymentFile("token")); err != nil {
		t.Fatal(err)
	}
	link := g.AddUser("ana")
	m.fails(1, "symbolic link", "login", link)
	if _, err := os.Stat(elsewhere); err == nil {
		t.Error("the token went through the link")
	}
	if err := os.Remove(m.deploymentFile("token")); err != nil {
		t.Fatal(err)
	}
	m.ok("login", link) // the code was not used up
}

func TestLoginTakesTheCertificateThatTheLinkNames(t *testing.T) {
	g := fakegateway.NewTLS(t)
	m := newMachine(t)
	m.ok("login", g.AddUser("ana"))
	m.ok("ls")
	if ca, err := os.ReadFile(m.deploymentFile("ca.pem")); err != nil || !strings.Contains(string(ca), "BEGIN CERTIFICATE") {
		t.Errorf("ca.pem: %q %v", ca, err)
	}
}

func TestLoginSendsNothingToAGatewayWithAnotherCertificate(t *testing.T) {
	g := fakegateway.NewTLS(t)
	link := g.AddUser("ana")
	reached := false
	other := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	other.StartTLS()
	defer other.Close()
	_, fragment, _ := strings.Cut(link, "#")
	last := "A"
	if strings.HasSuffix(fragment, "A") {
		last = "E"
	}
	// httptest has one certificate for all servers: the fingerprint is made wrong instead.
	wrong := other.URL + "/#" + fragment[:len(fragment)-2] + last + fragment[len(fragment)-1:]
	m := newMachine(t)
	m.fails(3, "not the gateway that the link was made by", "login", wrong)
	noPin, _, _ := strings.Cut(fragment, ".")
	m.fails(6, "fingerprint", "login", other.URL+"/#"+noPin)
	if reached {
		t.Error("a request was sent")
	}
}

func TestLoginRefusesWhatIsNoLink(t *testing.T) {
	m := newMachine(t)
	for _, link := range []string{
		"", "lab", "https://lab.example", "https://lab.example/#x", "https://lab.example/#sign-in=", "ftp://x/#sign-in=a",
		"http://lab.example/#sign-in=abc", "https://lab.example/#sign-in=abc.zzz", "https://u:p@lab.example/#sign-in=abc", "https://lab.example/path#sign-in=abc",
	} {
		r := m.fails(2, "carrel: ", "login", link)
		if strings.Contains(r.errOut, "abc") {
			t.Errorf("login %q: the code is in the message %q", link, r.errOut)
		}
	}
}

func TestLoginReadsTheLinkFromStdin(t *testing.T) {
	g := fakegateway.New(t)
	m := newMachine(t)
	m.sys.In = strings.NewReader(g.AddUser("ana") + "\n")
	m.ok("login", "-")
	if out := m.ok("whoami"); !strings.Contains(out, "ana") {
		t.Errorf("whoami: %s", out)
	}
}

func TestLoginWithAUsedLinkSaysSo(t *testing.T) {
	g := fakegateway.New(t)
	m := newMachine(t)
	link := g.AddUser("ana")
	m.ok("login", link)
	m.fails(3, "used up, expired or wrong", "login", link)
	m.ok("ls") // the first sign-in stays good
}

func TestLoginAgainEndsTheOldToken(t *testing.T) {
	g := fakegateway.New(t)
	m := newMachine(t)
	m.ok("login", g.AddUser("ana"))
	m.ok("login", g.AddUser("ana"))
	if n := g.Tokens("ana"); n != 1 {
		t.Errorf("tokens: %d", n)
	}
	if n := len(g.Keys("ana")); n != 1 {
		t.Errorf("keys: %d", n)
	}
}

func TestLogoutRevokesAndRemoves(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.AddWorkspace("ana", "w1")
	m.ok("ls")
	m.ok("logout")
	if g.Tokens("ana") != 0 || len(g.Keys("ana")) != 0 {
		t.Errorf("left at the gateway: %d tokens, %d keys", g.Tokens("ana"), len(g.Keys("ana")))
	}
	if _, err := os.Stat(filepath.Dir(m.deploymentFile("token"))); !os.IsNotExist(err) {
		t.Errorf("left on the machine: %v", err)
	}
	if strings.Contains(m.file(".ssh", "carrel", "config"), "w1") {
		t.Error("the ssh configuration still has w1")
	}
	m.fails(3, "carrel login LINK", "ls")
}

func TestLogoutWithoutAGatewayRemovesNothing(t *testing.T) {
	g := fakegateway.New(t)
	m := signedIn(t, g, "ana")
	g.Server.Close()
	m.fails(6, "--local", "logout")
	if _, err := os.Stat(m.deploymentFile("token")); err != nil {
		t.Error("the token is gone")
	}
	m.ok("logout", "--local")
}

// CLI-13: another person at another gateway: only their hosts remain for it, and each gateway has names of its own.
func TestSecondGatewayHasItsOwnNames(t *testing.T) {
	g1, g2 := fakegateway.New(t), fakegateway.New(t)
	m := signedIn(t, g1, "ana")
	g1.AddWorkspace("ana", "w1")
	m.ok("ls")
	m.fails(5, "--deployment", "login", g2.AddUser("bo"))
	m.ok("--deployment", "other", "login", g2.AddUser("bo"))
	g2.AddWorkspace("bo", "w1")
	m.ok("--deployment", "other", "ls")
	hosts := hostLines(m.file(".ssh", "carrel", "config"))
	if strings.Join(hosts, " ") != "w1.carrel w1.other.carrel" {
		t.Errorf("hosts: %v", hosts)
	}
	m.ok("deployment", "use", "other")
	if hosts := hostLines(m.file(".ssh", "carrel", "config")); strings.Join(hosts, " ") != "w1.carrel w1.lab.carrel" {
		t.Errorf("hosts after use: %v", hosts)
	}
	m.ok("logout")
	if hosts := hostLines(m.file(".ssh", "carrel", "config")); strings.Join(hosts, " ") != "w1.carrel" {
		t.Errorf("hosts after logout: %v", hosts)
	}
	m.fails(4, "no workspace", "show", "nothing-here")
	if g1.Calls(carrelv1connect.WorkspaceServiceGetProcedure) != 1 {
		t.Error("show did not go to the deployment that remains")
	}
}

func hostLines(config string) []string {
	var hosts []string
	for line := range strings.Lines(config) {
		if h, ok := strings.CutPrefix(line, "Host "); ok {
			hosts = append(hosts, strings.TrimSpace(h))
		}
	}
	return hosts
}
