package command

import (
	"context"
	"fmt"
	"sort"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const pageSize = 1000 // rows of a page, the most that the API gives

type listOptions struct {
	listFlags
	all     bool
	deleted bool
	watch   bool
}

func newList(a *app) *cobra.Command {
	o := listOptions{}
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List your workspaces",
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.watch {
				return a.watchList(cmd.Context(), o)
			}
			return a.list(cmd.Context(), o)
		},
	}
	a.listFlags(cmd, &o.listFlags)
	cmd.Flags().BoolVarP(&o.all, "all", "a", false, "everybody's (admins)")
	cmd.Flags().BoolVar(&o.deleted, "deleted", false, "deleted ones too")
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "go on showing changes until Ctrl-C")
	return cmd
}

func (a *app) list(ctx context.Context, o listOptions) error {
	if err := a.early(o.listFlags); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	all, err := allPages(func(token string) ([]*carrelv1.Workspace, string, error) {
		resp, err := api.workspaces.List(ctx, connect.NewRequest(&carrelv1.ListRequest{
			PageSize: pageSize, PageToken: token, AllUsers: o.all, IncludeDeleted: o.deleted,
		}))
		if err != nil {
			return nil, "", err
		}
		return resp.Msg.GetWorkspaces(), resp.Msg.GetNextPageToken(), nil
	})
	if err != nil {
		return err
	}
	if !o.all {
		a.learnFromList(ctx, api, all)
	}
	rows := make([]workspaceView, len(all))
	for i, w := range all {
		rows[i] = viewWorkspace(w)
	}
	return writeList(a, workspaceList(o.all, a.sys.Now()), rows, o.listFlags)
}

// watchList shows the list anew whenever something changes.
func (a *app) watchList(ctx context.Context, o listOptions) error {
	if err := a.early(o.listFlags); err != nil {
		return err
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	seen := map[string]workspaceView{}
	screen := newScreen(a)
	return api.watch(ctx, &carrelv1.WatchRequest{AllUsers: o.all}, watchEvents{
		Fresh: func() { clear(seen) },
		State: func(w *carrelv1.Workspace) (bool, error) {
			if w.GetState() == carrelv1.WorkspaceState_WORKSPACE_STATE_DELETED && !o.deleted {
				delete(seen, w.GetId())
			} else {
				seen[w.GetId()] = viewWorkspace(w)
			}
			return false, nil
		},
		Settled: func() error {
			rows := make([]workspaceView, 0, len(seen))
			for _, v := range seen {
				rows = append(rows, v)
			}
			sort.Slice(rows, func(i, j int) bool {
				return rows[i].Owner+"/"+rows[i].Name < rows[j].Owner+"/"+rows[j].Name
			})
			return screen.draw(func() error { return writeList(a, workspaceList(o.all, a.sys.Now()), rows, o.listFlags) })
		},
		Lost: func(text string) { a.say("carrel: %s", text) },
	})
}

// screen shows one picture after the other: over the last one on a terminal, below it elsewhere.
type screen struct {
	a     *app
	drawn bool
}

func newScreen(a *app) *screen { return &screen{a: a} }

func (s *screen) draw(picture func() error) error {
	var err error
	switch {
	case s.a.sys.OutTerminal:
		_, err = fmt.Fprint(s.a.sys.Out, "\x1b[H\x1b[2J")
	case s.drawn:
		_, err = fmt.Fprintln(s.a.sys.Out)
	}
	if err != nil {
		return err
	}
	s.drawn = true
	return picture()
}
