package gateway

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// cliName is what a served CLI binary is called: carrel-<os>-<arch>, `.exe` on Windows.
var cliName = regexp.MustCompile(`^carrel-(linux|darwin|windows)-(amd64|arm64)(\.exe)?$`)

// files serves what a laptop needs before it can call the API: the CA's certificate, the CLI binaries and a script that installs one.
type files struct {
	dir  string // of the CLI binaries
	base func() string
	ca   []byte // PEM; empty when the certificate is publicly trusted
}

func (f *files) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /ca.pem", f.serveCA)
	mux.HandleFunc("GET /cli/{name}", f.serveCLI)
	mux.HandleFunc("GET /install.sh", f.serveInstall)
	mux.HandleFunc("GET /{$}", f.serveRoot)
}

func (f *files) serveCA(w http.ResponseWriter, _ *http.Request) {
	if len(f.ca) == 0 {
		http.Error(w, "this gateway has no CA of its own", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/x-pem-file")
	_, _ = w.Write(f.ca) // the client is gone when this fails
}

func (f *files) serveCLI(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	if !cliName.MatchString(name) {
		http.Error(w, "no such program; "+f.offered(), http.StatusNotFound)
		return
	}
	path := filepath.Join(f.dir, name)
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		http.Error(w, "this gateway does not have "+name+"; "+f.offered(), http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	http.ServeFile(w, r, path)
}

// offered lists the binaries that are there.
func (f *files) offered() string {
	entries, _ := os.ReadDir(f.dir) // a missing directory has no entries
	var names []string
	for _, e := range entries {
		if cliName.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return "it has none yet: its admin runs `make dist` and puts the CLI binaries beside carreld, or sets cli_dir"
	}
	return "it has " + strings.Join(names, ", ")
}

// serveRoot tells a person who opens the address what it is. A sign-in link's code stands in the fragment, which never gets here.
func (f *files) serveRoot(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Referrer-Policy", "no-referrer")
	fmt.Fprintf(w, "This is a Carrel gateway.\n\nInstall the command line:  curl -fsSL %s/install.sh | sh\nSign in:                   carrel login LINK   (an admin prints a link with `carrel user sign-in NAME`)\n", f.base())
}

func (f *files) serveInstall(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/x-shellscript; charset=utf-8")
	fmt.Fprintf(w, installScript, f.base())
}

// installScript fetches the CLI for this machine into ~/.local/bin. Its one parameter is the gateway's base URL.
const installScript = `#!/bin/sh
# Installs the carrel command from its gateway into ~/.local/bin (or $CARREL_BIN).
set -eu
base='%s'
bin=${CARREL_BIN:-$HOME/.local/bin}
case $(uname -s) in
  Linux) os=linux ;;
  Darwin) os=darwin ;;
  *) echo "install: no carrel for $(uname -s) here; Windows: $base/cli/carrel-windows-amd64.exe" >&2; exit 1 ;;
esac
case $(uname -m) in
  x86_64|amd64) arch=amd64 ;;
  aarch64|arm64) arch=arm64 ;;
  *) echo "install: no carrel for $(uname -m)" >&2; exit 1 ;;
esac
mkdir -p "$bin"
tmp=$(mktemp "$bin/.carrel.XXXXXX")
trap 'rm -f "$tmp"' EXIT
curl -fsSL ${CARREL_CA:+--cacert "$CARREL_CA"} -o "$tmp" "$base/cli/carrel-$os-$arch"
chmod 755 "$tmp"
"$tmp" version >/dev/null
mv "$tmp" "$bin/carrel"
trap - EXIT
echo "installed $bin/carrel"
case :$PATH: in *:"$bin":*) ;; *) echo "put $bin on your PATH" ;; esac
`
