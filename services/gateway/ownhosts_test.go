package gateway_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

// clientsOf returns a client of each version of HTTP that the port speaks.
func clientsOf(t *testing.T, r *rig) map[string]*http.Client {
	out := map[string]*http.Client{}
	for name, set := range map[string]func(*http.Protocols){
		"HTTP/1.1": func(p *http.Protocols) { p.SetHTTP1(true) },
		"HTTP/2":   func(p *http.Protocols) { p.SetHTTP2(true); p.SetUnencryptedHTTP2(true) },
	} {
		transport := &http.Transport{Protocols: new(http.Protocols)}
		set(transport.Protocols)
		if pem := r.g.CAPEM(); pem != nil {
			roots := x509.NewCertPool()
			roots.AppendCertsFromPEM(pem)
			transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		}
		t.Cleanup(transport.CloseIdleConnections)
		out[name] = &http.Client{Transport: transport}
	}
	return out
}

// as sends a request under another name and returns status and text.
func as(t *testing.T, c *http.Client, method, url, host string) (int, string, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	res, err := c.Do(req)
	if err != nil {
		t.Fatalf("%s: %v", host, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(body), res.Proto
}

// T-5: a page whose name was made to lead here reaches nothing, by whatever version of HTTP; all names of ours do.
func TestOnlyRequestsThatNameThisGatewayAreServed_T5(t *testing.T) {
	t.Run("plain", func(t *testing.T) {
		onlyOwnNames(t, start(t, "hosts=Alias.example.org,192.0.2.7,2001:db8::7", "tls.names=tls.example.org"))
	})
	t.Run("own CA", func(t *testing.T) {
		onlyOwnNames(t, start(t, "listen=0.0.0.0:0", "hosts=alias.example.org,192.0.2.7,2001:db8::7", "tls.names=tls.example.org"))
	})
}

func onlyOwnNames(t *testing.T, r *rig) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	own := []string{
		r.address(), "localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:7070", "127.8.9.1:80", "[::1]:7070", "[::1]", "[::ffff:127.0.0.1]", name,
		"alias.example.org", "alias.example.org.:443", "192.0.2.7", "[2001:db8::7]:7", "tls.example.org",
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr := netip.MustParsePrefix(a.String()).Addr()
		own = append(own, netip.AddrPortFrom(addr, 7070).String())
	}
	others := []string{
		"rebind.evil.test", "rebind.evil.test:7070", "localhost.evil.test", "evil.localhost", "127.0.0.1.evil.test", "2130706433", "0x7f000001", "127.1", "192.0.2.8", "[2001:db8::8]:7070",
		"x.alias.example.org", "alias.example.orgx", "alias", "xlocalhost", "[::1", strings.Repeat("a.", 120) + "test",
	}
	for version, c := range clientsOf(t, r) {
		for _, host := range own {
			if code, body, proto := as(t, c, http.MethodGet, r.url+"/healthz", host); code != http.StatusOK || !strings.HasPrefix(proto, version) {
				t.Errorf("%s as %s: %d %s", proto, host, code, body)
			}
		}
		for _, host := range others {
			for _, path := range []string{"/healthz", "/", "/install.sh", "/carrel/link", "/carrel/attach", "/nothing"} {
				code, body, proto := as(t, c, http.MethodGet, r.url+path, host)
				if code != http.StatusMisdirectedRequest || !strings.Contains(body, "the setting hosts") || !strings.HasPrefix(proto, version) {
					t.Errorf("%s %s as %s: %d %s", proto, path, host, code, body)
				}
			}
			if code, _, _ := as(t, c, http.MethodPost, r.url+"/carrel.v1.AuthService/ServerInfo", host); code != http.StatusMisdirectedRequest {
				t.Errorf("%s call as %s: %d", version, host, code)
			}
		}
	}
	misnamed := &http.Client{Transport: renamed{r.http.Transport}}
	_, err = carrelv1connect.NewAuthServiceClient(misnamed, r.url).ServerInfo(t.Context(), connect.NewRequest(&carrelv1.ServerInfoRequest{}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), `not known as "rebind.evil.test"`) {
		t.Errorf("what a client says: %v", err)
	}
}

// renamed sends calls under another name.
type renamed struct{ http.RoundTripper }

func (n renamed) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Host = "rebind.evil.test"
	return n.RoundTripper.RoundTrip(req)
}
