package command

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
)

// semver returns the three numbers of a version such as v1.2.3-4-gabc; ok is false for others, such as dev builds.
func semver(s string) (n [3]int, ok bool) {
	s = strings.TrimPrefix(s, "v")
	s, _, _ = strings.Cut(s, "-")
	s, _, _ = strings.Cut(s, "+")
	parts := strings.Split(s, ".")
	if len(parts) != len(n) {
		return n, false
	}
	for i, p := range parts {
		v, err := strconv.Atoi(p)
		if err != nil || v < 0 {
			return n, false
		}
		n[i] = v
	}
	return n, true
}

// newerVersion reports whether a is newer than b; known is false where they cannot be compared or are equal.
func newerVersion(a, b string) (newer, known bool) {
	x, okX := semver(a)
	y, okY := semver(b)
	if !okX || !okY {
		return false, false
	}
	for i := range x {
		if x[i] != y[i] {
			return x[i] > y[i], true
		}
	}
	return false, false
}

type versionView struct {
	Version string `json:"version"`
	Gateway string `json:"gateway,omitempty"`
	Address string `json:"address,omitempty"`
}

func newVersion(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "This program's version, and the gateway's where one is reached",
		Args:  exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versionView{Version: a.sys.Version}
			if api, err := a.connect(); err == nil {
				if info, err := api.serverInfo(cmd.Context()); err == nil {
					v.Gateway, v.Address = info.GetVersion(), api.dep.Gateway
				}
			}
			return a.showOne(format, v, [][2]string{{"carrel", v.Version}, {"gateway", v.Gateway}, {"address", v.Address}})
		},
	}
	a.formatFlag(cmd, &format)
	return cmd
}

func (a *app) showOne(format string, v any, pairs [][2]string) error {
	f, err := a.format(format)
	if err != nil {
		return err
	}
	switch f {
	case output.JSON:
		return output.WriteJSON(a.sys.Out, v)
	case output.CSV:
		return usagef("-o csv is for lists; use table or json here")
	default:
		return output.Pairs(a.sys.Out, pairs)
	}
}
